"""An app of the worker's tests: receivers of all signals, and a subscriber that gives every message up."""
