"""A sweep as people see it: page, terminal and figures."""
