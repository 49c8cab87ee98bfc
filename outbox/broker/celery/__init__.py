"""The only modules of the broker that import Celery: they wire, the work is done elsewhere."""
