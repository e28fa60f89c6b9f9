"""The report: an HTML page with tables and figures of runs."""
