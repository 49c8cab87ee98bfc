"""The settings of a small project with every part of this tree, and what proves that nothing of the package is missing.

`python -m tests.house.small_project` runs Django's checks, as `manage.py check` does, and imports every module of
the package. tests/house/removal.py runs it in copies of the tree that lack parts.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import django

from tests.part_apps import part_apps

SECRET_KEY = "tests"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = [
    *(["django_tasks"] if django.VERSION < (6, 0) else []),
    *(f"django.contrib.{app}" for app in ("contenttypes", "auth", "sessions", "messages", "admin")),
    *("outbox.contrib.django", *part_apps()),
]
DATABASES = {alias: {"ENGINE": "django.db.backends.postgresql", "NAME": alias} for alias in ("default", "broker")}
DATABASE_ROUTERS = ["outbox.contrib.django.routers.BrokerRouter"]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
ROOT_URLCONF = "outbox.contrib.django.urls"
STATIC_URL = "static/"
OUTBOX: dict[str, Any] = {"BROKER": "broker", "PRODUCER_GROUP": "small", "TOPICS": {"orders": {}}}


def modules(package: Path) -> list[str]:
    """The names of all modules in the folder of a package."""
    files = sorted(path.relative_to(package.parent).with_suffix("") for path in package.rglob("*.py"))
    return [".".join(path.parts).removesuffix(".__init__") for path in files]


if __name__ == "__main__":
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.house.small_project"
    django.setup()
    from django.core.management import call_command

    import outbox

    call_command("check", fail_level="WARNING")
    for name in modules(Path(outbox.__path__[0])):
        import_module(name)
