"""Grids of training runs, which `launch/sweep.py` starts."""
