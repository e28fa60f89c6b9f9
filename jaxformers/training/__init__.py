"""One trainer for every model and task."""
