"""Sizes and schedules of published code, which the files in `configs/` use."""
