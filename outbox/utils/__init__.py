"""General helpers: waiting, time, text, identifiers, and fault points for tests."""
