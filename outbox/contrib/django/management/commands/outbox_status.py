"""`manage.py outbox_status`: how the broker and its groups are; non-zero when something needs attention."""

from __future__ import annotations

import sys
from typing import Any, Final

from django.core.management.base import CommandParser

from outbox.contrib.django.management.output import OutboxCommand
from outbox.contrib.django.operations import ProjectStatus, project_status

_COUNTERS: Final = ("handled", "skipped", "filtered", "lag", "retrying", "dead", "discarded", "expired")


class Command(OutboxCommand):
    """Parses, then calls project_status."""

    help = "Show topics, groups, blocked queues and problems. Exits with 1 when there are any."

    def add_arguments(self, parser: CommandParser) -> None:
        self.add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        status = project_status()
        if options["json"]:
            self.print_json(status.as_json())
        else:
            self._print(status)
        if status.problems:
            sys.exit(1)

    def _print(self, status: ProjectStatus) -> None:
        broker = status.broker
        self.say(f"broker {broker.broker_id}, last tick {broker.last_tick}, leader {broker.leader or 'none'}")
        self.print_rows(
            ["topic", "types", "queues", "sent", "committed", "rolled back", "undecided", "parked", "queued"],
            (
                (
                    t.name,
                    "+".join(t.types),
                    t.queue_count,
                    t.totals.sent,
                    t.totals.committed,
                    t.totals.rolled_back,
                    t.totals.undecided,
                    t.totals.parked,
                    t.totals.queued,
                )
                for t in broker.topics
            ),
        )
        self.say("")
        self.print_rows(
            ["group", "topics", "consumers", *_COUNTERS, "paused"],
            (
                (
                    g.name,
                    ",".join(g.topics),
                    g.live_consumers,
                    *(getattr(g, name) for name in _COUNTERS),
                    "yes" if g.paused else "",
                )
                for g in broker.groups
            ),
        )
        for problem in status.problems:
            self.say(f"PROBLEM: {problem}", self.style.ERROR)
