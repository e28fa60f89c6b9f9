"""Notebooks, and the script that runs them."""
