"""Shared utilities: errors, registries, files and command lines.

Any module of the package may import them.
"""
