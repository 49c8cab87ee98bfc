"""A Django application without outbox and without messages."""
