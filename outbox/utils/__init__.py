"""Helpers that know nothing about messages: waiting, time, text, identifiers, and fault points of tests."""
