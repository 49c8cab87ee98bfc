"""Typed events: messages whose bodies have a declared type and a version."""
