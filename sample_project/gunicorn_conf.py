"""Gunicorn's settings for the site: several processes with several threads each."""

from __future__ import annotations

import os

from gunicorn.config import KNOWN_SETTINGS

wsgi_app = "sample_project.wsgi"
bind = os.environ.get("SAMPLE_BIND", "127.0.0.1:8000")  # settings.py has the same default
workers = 2
threads = 4
graceful_timeout = 5
timeout = 30
if any(setting.name == "control_socket_disable" for setting in KNOWN_SETTINGS):
    # Its default place is shared by all sites of a user, and this sample does not use it.
    control_socket_disable = True
