"""A backend for Django's tasks (`django.tasks`, before Django 6 the package django-tasks). It is a separate app.

    INSTALLED_APPS = [..., "outbox.contrib.django", "outbox.contrib.django.tasks"]
    OUTBOX = {..., "TOPICS": {"tasks": {"types": ["NORMAL", "DELAY", "TRANSACTION"]}}}
    TASKS = {"default": {"BACKEND": "outbox.contrib.django.tasks.backend.OutboxBackend"}}

A task that is enqueued in a transaction runs if and only if the transaction commits. Its effects happen once, because
its result row, its writes to that database and its inbox row are one transaction. docs/django.md has the limits.
"""
