"""Sagas: an app whose table stores how far each saga has come. `steps` explains sagas; docs/saga.md is their page.

INSTALLED_APPS = [..., "outbox.contrib.django", "outbox.contrib.saga"]
"""
