"""`manage.py outbox_status`: the conditions that need attention, and the state of the broker and its groups."""

from __future__ import annotations

import sys
import time
from typing import Any

from django.core.management.base import CommandParser

from outbox.broker.operations.conditions import duration
from outbox.broker.operations.summary import Overview
from outbox.contrib.django.management.output import OutboxCommand
from outbox.contrib.django.operations.watching import BrokerView, look


class Command(OutboxCommand):
    """Parses, then calls look."""

    help = "Show what needs attention, topics and groups. Exits with 0, 1 (warning) or 2 (critical)."

    def add_arguments(self, parser: CommandParser) -> None:
        self.add_json(parser)
        parser.add_argument(
            "--watch", type=float, nargs="?", const=2.0, metavar="SECONDS", help="repeat until interrupted"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        found = self._show(options["json"])
        while options["watch"]:
            try:
                time.sleep(options["watch"])
                self.clear()
                found = self._show(options["json"])
            except KeyboardInterrupt:
                break
        if found.verdict.severity:
            sys.exit(int(found.verdict.severity))

    def _show(self, as_json: bool) -> BrokerView:
        found = look()
        if as_json:
            self.print_json(found.as_json())
            return found
        for condition in found.verdict.conditions:
            self.print_condition(condition)
        if not found.verdict.is_complete:
            self.say("the broker did not answer: every other condition is unknown", self.style.ERROR)
        elif not found.verdict.conditions:
            self.say("nothing needs attention", self.style.SUCCESS)
        if found.overview is not None:
            self._print_overview(found.overview)
        return found

    def _print_overview(self, broker: Overview) -> None:
        self.say("")
        self.say(
            f"broker {broker.broker_id}, leader {broker.leader or 'none'}, tick {broker.last_tick} "
            f"{duration(broker.last_tick_seconds_ago)} ago; counted {duration(broker.counted_seconds_ago)} ago"
        )
        self.say("")
        self.print_rows(
            ["topic", "queues", "queued", "undecided", "parked", "held"],
            ((t.topic, t.queues, t.queued, t.undecided, t.parked, t.held) for t in broker.topics),
        )
        self.say("")
        self.print_rows(
            ["group", "topics", "consumers", "handled", "lag", "oldest", "retrying", "dead", "halted", "paused"],
            (
                (
                    g.name,
                    g.topics,
                    g.consumers,
                    g.handled,
                    g.lag,
                    duration(g.oldest_seconds),
                    g.retrying,
                    g.dead,
                    g.blocked + g.stopped or "",
                    "yes" if g.paused else "",
                )
                for g in broker.groups
            ),
        )
