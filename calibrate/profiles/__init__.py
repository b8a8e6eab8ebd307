"""Shipped profiles, one JSON file a GPU, built by `python -m calibrate.build`; this package holds data only."""
