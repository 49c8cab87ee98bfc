"""How long the operations page takes to answer at a broker's size: `python -m benchmarks.pages DATABASE_URL`.

A process of its own, because Django is configured once; benchmarks/status.py makes the broker and prints the result.
"""

from __future__ import annotations

import json
import re
import sys

import django
from django.conf import settings
from django.test import Client

from benchmarks.harness import timed
from outbox.contrib.django.databases import database_from_url

_REPEATS = 10
PAGES = {
    "overview": "",
    "history": "history/",
    "message": "messages/{message}/",
    "newest of a topic": "messages/?topic=topic-7",
    "undecided": "undecided/",
    "dead letters by error": "dead-letters/",
    "letters of a group": "dead-letters/list/?group=group-1",
    "groups": "groups/",
    "group with queues": "groups/one/?name=group-1&topic=topic-7",
    "workers": "workers/",
    "retried messages": "waiting/?retrying=yes",
    "topics": "topics/",
}


def main(url: str) -> None:
    """Print a JSON object: page -> milliseconds, with their spread."""
    client = _client(url)
    listed = client.get("/outbox/messages/?topic=topic-7").content.decode()
    match = re.search(r"/outbox/messages/([0-9a-f-]{36})/", listed)
    assert match is not None
    message = match[1]
    found = {}
    for name, page in PAGES.items():
        address = f"/outbox/{page.format(message=message)}"
        assert client.get(address).status_code == 200, address

        def ask(address: str = address) -> None:
            client.get(address)

        found[name] = timed(ask, _REPEATS)
    print(json.dumps(found))


def _client(url: str) -> Client:
    """A user who may see everything; accounts and audit are in a SQLite file in memory."""
    from django.core.management import call_command

    settings.configure(
        SECRET_KEY="bench",
        USE_TZ=True,
        ALLOWED_HOSTS=["testserver"],
        ROOT_URLCONF="benchmarks.pages_urls",
        INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "outbox.contrib.django"],
        DATABASES={
            "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
            "broker": database_from_url(url),
        },
        DATABASE_ROUTERS=["outbox.contrib.django.routers.BrokerRouter"],
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        MIDDLEWARE=[
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
        ],
        SESSION_ENGINE="django.contrib.sessions.backends.signed_cookies",
        TEMPLATES=[{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}],
        STATIC_URL="static/",
        OUTBOX={"BROKER": "broker", "PRODUCER_GROUP": "bench"},
    )
    django.setup()
    call_command("migrate", verbosity=0)
    from django.contrib.auth.models import User

    client = Client()
    client.force_login(User.objects.create_superuser("operator"))
    return client


if __name__ == "__main__":
    main(sys.argv[1])
