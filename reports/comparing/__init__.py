"""A comparison of scenarios as people see it: the answer, the table behind it, and why they differ."""
