"""Connect Celery to the broker. Only the modules of this package import Celery."""
