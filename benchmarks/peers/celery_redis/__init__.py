"""Celery with Redis: the task is sent after the commit, and lost if the process dies between."""
