"""`manage.py outbox_process list|drain|stop`."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from outbox.broker.database.executor import Executor
from outbox.broker.operations.listings import PROCESS_STATES, ConsumerProcess, list_processes
from outbox.contrib.django.database.aliases import broker_connection
from outbox.contrib.django.management.acting import ActionCommand


class Command(ActionCommand):
    """Parses the arguments, then calls the function of the chosen subcommand."""

    help = "List the consumer processes, drain one of them, or stop its worker."

    def add_arguments(self, parser: CommandParser) -> None:
        listing = self.add_subcommands(parser).add_parser("list", help="list the consumer processes of all workers")
        listing.add_argument("--group", help="only processes of this consumer group")
        listing.add_argument("--state", choices=PROCESS_STATES, help="only processes in this state")
        self.add_json(listing)

    def _list(self, options: dict[str, Any]) -> None:
        with broker_connection() as (connection, schema):
            found = list_processes(Executor(connection, schema), options["group"], state=options["state"], limit=10_000)
        if options["json"]:
            self.print_json([_as_json(one) for one in found])
            return
        self.print_rows(
            ["process", "host", "pid", "state", "asked", "version", "groups", "queues", "calls"],
            (
                (one.instance_id, one.host, one.pid, one.state, one.asked or "-", one.version or "-",
                 ", ".join(one.groups), one.queues, one.calls)
                for one in found
            ),
        )  # fmt: skip


def _as_json(one: ConsumerProcess) -> dict[str, Any]:
    return {
        "process": str(one.instance_id),
        "host": one.host,
        "pid": one.pid,
        "state": one.state,
        "asked": one.asked,
        "version": one.version,
        "groups": list(one.groups),
        "queues": one.queues,
        "calls": one.calls,
        "leads": one.leads,
        "seen_at": one.seen_at and one.seen_at.isoformat(),
    }
