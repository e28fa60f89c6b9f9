"""Certified bounds on distances and predictions, and searches against them."""
