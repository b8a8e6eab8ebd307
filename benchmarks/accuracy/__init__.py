"""How far predictions are from measured runs: `python -m benchmarks.accuracy REFERENCE` writes docs/accuracy.md."""
