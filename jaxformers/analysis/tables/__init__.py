"""Tables over finished runs, read from their workdirs."""
