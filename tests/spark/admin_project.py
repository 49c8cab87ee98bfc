"""A Django project with the admin: saves the findings of a result in its table and prints the admin's pages.

python -m tests.spark.admin_project DATABASE_NAME HOST USER OUTPUT
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import django
from django.conf import settings
from django.urls import URLPattern, URLResolver, path

from tests.part_apps import part_apps

urlpatterns: list[URLPattern | URLResolver] = []
_APPS = ("admin", "auth", "contenttypes", "sessions", "messages")
_MIDDLEWARE = (
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
)
_CONTEXT = (
    "django.template.context_processors.request",
    "django.contrib.auth.context_processors.auth",
    "django.contrib.messages.context_processors.messages",
)


def configure(name: str, host: str, user: str) -> None:
    engine = "django.db.backends.postgresql"
    settings.configure(
        SECRET_KEY="tests",
        USE_TZ=True,
        ALLOWED_HOSTS=["testserver"],
        ROOT_URLCONF=__name__,
        DATABASES={"default": {"ENGINE": engine, "NAME": name, "HOST": host, "USER": user}},
        INSTALLED_APPS=[*(f"django.contrib.{app}" for app in _APPS), "outbox.contrib.django", *part_apps()],
        MIDDLEWARE=list(_MIDDLEWARE),
        TEMPLATES=[
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "APP_DIRS": True,
                "OPTIONS": {"context_processors": list(_CONTEXT)},
            }
        ],
        OUTBOX={"PRODUCER_GROUP": "tests"},
    )
    django.setup()


def main(name: str, host: str, user: str, output: str) -> None:
    configure(name, host, user)
    from django.contrib import admin
    from django.contrib.auth.models import User
    from django.core.management import call_command
    from django.test import Client

    from outbox.contrib.reconciliation.management.commands.outbox_reconcile import Command
    from outbox.contrib.reconciliation.models import Finding

    urlpatterns.append(path("admin/", admin.site.urls))
    call_command("migrate", verbosity=0)
    rules = str(Path(output).parent / "reconcile.toml")
    for _ in range(2):  # The second call replaces the rows of the first.
        Command().save({"output": output, "rules": rules, "database": []}, os.environ)
    client = Client()
    client.force_login(User.objects.create_superuser("operator"))
    print(client.get("/admin/outbox_reconciliation/finding/").content.decode())
    found = Finding.objects.filter(finding_class="MISMATCH").get()
    print(client.get(f"/admin/outbox_reconciliation/finding/{found.pk}/change/").content.decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
