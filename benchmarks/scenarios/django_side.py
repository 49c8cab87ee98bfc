"""What the adapters of Django systems share: their settings, their tables, their transaction and their effect."""

from __future__ import annotations

import os
from collections.abc import Callable

from benchmarks.scenarios.contract import EFFECT, ORDER, handler_works

Send = Callable[[int, str], object]


def use(system: str) -> None:
    """The settings, for this process and the worker that it starts."""
    os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.scenarios.settings"
    os.environ["SCENARIO_SYSTEM"] = system


def prepare() -> None:
    import django
    from django.core.management import call_command

    django.setup()
    call_command("migrate", verbosity=0)


def blocks(sender: Callable[[], Send]) -> Callable[[], Callable[[str], None]]:
    """`sender` is called once Django is set up; what it returns sends the message about an order."""

    def make() -> Callable[[str], None]:
        import django

        django.setup()
        from django.db import connection, transaction

        send = sender()

        def block(padding: str) -> None:
            try:
                with transaction.atomic(), connection.cursor() as cursor:
                    cursor.execute(ORDER)
                    send(cursor.fetchall()[0][0], padding)
            except Exception:
                connection.close()
                raise

        return block

    return make


def write_effect(order: int) -> None:
    from django.db import connection

    handler_works()
    with connection.cursor() as cursor:
        cursor.execute(EFFECT, [order])
