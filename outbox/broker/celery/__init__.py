"""The only modules of the broker that import Celery: they connect it to the code of other modules."""
