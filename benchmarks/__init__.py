"""Benchmarks. Each module prints tables and writes JSON; none is a test."""
