"""Figures as rows of data, and the ways in which they are drawn."""
