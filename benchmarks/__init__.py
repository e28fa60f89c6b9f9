"""Measurements, never run as tests; each prints a table and writes JSON."""
