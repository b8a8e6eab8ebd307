"""A vLLM of a few lines: what the observer touches of one, on top of the naive engine of `tests/sim/oracle/`."""

__version__ = "0.32.0+fake"
