"""Trained models loaded from their workdirs, scored and exported."""
