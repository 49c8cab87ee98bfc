"""How long the operations page takes to answer, and how large it is: `python -m benchmarks.pages DATABASE_URL`.

A process of its own, because Django is configured once; benchmarks/status.py makes the broker and prints the result.
"""

from __future__ import annotations

import json
import re
import sys
from io import StringIO

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
    "topic": "topics/one/?name=topic-7",
    "history of a group": "history/?group=group-1",
    "undecided and parked": "undecided/?parked=yes",
    "delayed messages": "waiting/?delayed=yes",
    "groups that are behind": "groups/?state=behind",
    "schedules": "schedules/",
    "findings": "findings/",
    "incidents": "incidents/",
    "audit": "audit/",
}


def main(url: str) -> None:
    """Print a JSON object: page -> milliseconds with their spread, and kilobytes."""
    client = _client(url)
    listed = client.get("/outbox/messages/?topic=topic-7").content.decode()
    match = re.search(r"/outbox/messages/([0-9a-f-]{36})/", listed)
    assert match is not None
    message = match[1]
    found = {}
    for name, page in PAGES.items():
        address = f"/outbox/{page.format(message=message)}"
        answer = client.get(address)
        assert answer.status_code == 200, address

        def ask(address: str = address) -> None:
            client.get(address)

        found[name] = f"{timed(ask, _REPEATS)}; {len(answer.content) / 1000:.0f} kB"
    print(json.dumps(found))


def _client(url: str) -> Client:
    """A user who may see everything; accounts and audit are in a SQLite file in memory."""
    from django.core.management import call_command

    settings.configure(
        SECRET_KEY="bench",
        USE_TZ=True,
        ALLOWED_HOSTS=["testserver"],
        ROOT_URLCONF="benchmarks.pages_urls",
        INSTALLED_APPS=[
            *("django.contrib.contenttypes", "django.contrib.auth", "outbox.contrib.django"),
            *("outbox.contrib.console", "outbox.contrib.schedules"),
        ],
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
    # benchmarks/status.py has installed the core only.
    call_command("outbox_install", stdout=StringIO())
    from django.contrib.auth.models import User

    client = Client()
    client.force_login(User.objects.create_superuser("operator"))
    return client


if __name__ == "__main__":
    main(sys.argv[1])
