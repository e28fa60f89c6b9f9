"""Errors, registries, files and command lines; any module may import them."""
