"""Figures, and the HTML page that shows them with the tables of runs."""
