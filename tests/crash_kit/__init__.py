"""Handlers with planted faults, and correct ones, on which the crash kit is measured."""
