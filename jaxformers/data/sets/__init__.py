"""Readers of published data sets, one module for each data set."""
