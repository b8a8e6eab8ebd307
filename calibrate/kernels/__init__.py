"""Fitted models of kernel times, one family a file. They know shapes and seconds, nothing of models or requests."""
