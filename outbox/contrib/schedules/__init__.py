"""Schedules: the leader publishes a message at each due moment of a cron expression.

docs/schedules.md is their page.
"""
