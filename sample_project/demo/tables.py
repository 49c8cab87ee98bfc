"""Create the sample's tables, Celery's queues and the user: `python -m sample_project.demo.tables ALIAS...`.

One process for all of it: each one more would load Django again before the first order.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import django
from django.core.management import call_command

from sample_project import server

OPERATOR = "operator"


def create(aliases: Iterable[str]) -> None:
    """Migrate the databases, then create the queues, and the user of the operations page.

    With your own PostgreSQL an earlier run may have left a user.
    """
    django.setup()
    for alias in aliases:
        call_command("migrate", database=alias, interactive=False)
    from django.contrib.auth.models import User

    if not User.objects.filter(username=OPERATOR).exists():
        User.objects.create_superuser(OPERATOR, f"{OPERATOR}@localhost", OPERATOR)
    server.create_queues()


if __name__ == "__main__":
    create(sys.argv[1:])
