"""Measurements, scores and exports of trained models."""
