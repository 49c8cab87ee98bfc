"""The site as a WSGI application: `gunicorn sample_project.wsgi`."""

from __future__ import annotations

import os

from django.core.wsgi import get_wsgi_application

from sample_project import server

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "sample_project.settings")
server.start()
application = get_wsgi_application()
