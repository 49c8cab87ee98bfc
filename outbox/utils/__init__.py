"""Helpers without knowledge of messages: waiting, time, text, identifiers, and fault points of tests."""
