"""Commands: one module for each command, whose docstring is its help."""
