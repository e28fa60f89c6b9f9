"""Tables of finished runs, read from their workdirs, and of model costs."""
