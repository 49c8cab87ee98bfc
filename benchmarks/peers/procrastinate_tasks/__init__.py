"""procrastinate: `defer` writes a job on Django's connection, `manage.py procrastinate worker` takes single ones."""
