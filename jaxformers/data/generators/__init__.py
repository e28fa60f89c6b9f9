"""Generators of examples, which are pure functions of a seed."""
