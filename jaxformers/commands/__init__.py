"""Commands: a module for each, whose docstring is its help."""
