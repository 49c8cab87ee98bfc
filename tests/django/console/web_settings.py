"""Settings of the web process of these tests: as `configured.py`, with the databases of the environment."""

from __future__ import annotations

from tests.django.worker_settings import *  # noqa: F403
from tests.django.worker_settings import INSTALLED_APPS as APPS

INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "django.contrib.staticfiles", *APPS]
ROOT_URLCONF = "tests.django.urls"
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
]
SESSION_ENGINE = "django.contrib.sessions.backends.signed_cookies"
TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}]
STATIC_URL = "static/"
ALLOWED_HOSTS = ["127.0.0.1"]
