"""Predicted against measured, as people see it."""
