"""The operations page: what the broker knows, and what an operator may do about it."""
