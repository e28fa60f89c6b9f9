"""Published data sets, one file each: their archives and examples."""
