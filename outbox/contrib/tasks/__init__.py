"""A separate app with a backend for Django's tasks (`django.tasks`; before Django 6, the package django-tasks).

    INSTALLED_APPS = [..., "outbox.contrib.django", "outbox.contrib.tasks"]
    OUTBOX = {..., "TOPICS": {"tasks": {"types": ["NORMAL", "DELAY", "TRANSACTION"]}}}
    TASKS = {"default": {"BACKEND": "outbox.contrib.tasks.backend.OutboxBackend"}}

A task that is enqueued in a transaction runs if and only if the transaction commits. The writes of the task to the
database of its result row happen once, because these writes, the result row and the inbox row are one transaction.
docs/django.md has the limits.
"""
