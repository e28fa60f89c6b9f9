"""Measurements, tables and figures of runs and trained models."""
