"""What can be said of runs and models that are there: pure functions."""
