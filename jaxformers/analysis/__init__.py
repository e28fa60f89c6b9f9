"""Measurements, tables and figures of runs and of trained models."""
