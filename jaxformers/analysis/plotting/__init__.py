"""Figures: rows of data, and functions that draw them."""
