"""Generators of examples: pure functions of a seed."""
