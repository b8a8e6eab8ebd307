"""A plan as people see it: the answer, what it rests on, and everything that was considered."""
