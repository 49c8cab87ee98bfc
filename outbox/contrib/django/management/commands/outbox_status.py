"""`manage.py outbox_status`: the conditions that need attention, and the state of the broker and its groups."""

from __future__ import annotations

import sys
from typing import Any

from django.core.management.base import CommandError, CommandParser

from outbox.broker.operations.conditions import duration
from outbox.broker.operations.summary import Overview
from outbox.contrib.django.management.output import OutboxCommand
from outbox.contrib.django.operations.watching import BrokerView, look, probe
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.worker.probes import live, ready


class Command(OutboxCommand):
    help = (
        "Show the conditions that need attention, the topics and the groups. Exit codes: 0, 1 (warning) or 2 "
        "(critical). The column `handled` counts the messages that a group has done since its start; messages that a "
        "reset lets it read again count again. --probe, --live and --ready are cheap probes with the exit codes 0 "
        "(healthy) and 1."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        self.add_json(parser)
        probes = parser.add_mutually_exclusive_group()
        probes.add_argument("--probe", action="store_true", help="show only whether the broker delivers messages")
        probes.add_argument(
            "--live",
            action="store_true",
            help="show whether every process of this machine's worker has a recent heartbeat; reads no database",
        )
        probes.add_argument("--ready", action="store_true", help="like --live, and show whether every process can work")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["probe"] or options["live"] or options["ready"]:
            self._probe(options)
            return
        found = self._show(options["json"])
        if found.verdict.severity:
            sys.exit(int(found.verdict.severity))

    def _probe(self, options: dict[str, Any]) -> None:
        if not options["probe"] and not get_settings().health_directory:
            raise CommandError(
                "OUTBOX['HEALTH_DIRECTORY'] is not set, so the worker writes no heartbeats: set this setting."
            )
        found = probe() if options["probe"] else live() if options["live"] else ready()
        if options["json"]:
            self.print_json({"healthy": found.is_healthy, "problems": list(found.problems)})
        else:
            self.say("healthy" if found.is_healthy else "; ".join(found.problems))
        if not found.is_healthy:
            sys.exit(1)

    def _show(self, as_json: bool) -> BrokerView:
        found = look()
        if as_json:
            self.print_json(found.as_json())
            return found
        for condition in found.verdict.conditions:
            self.print_condition(condition)
        if not found.verdict.is_complete:
            self.say("the broker was not read: every other condition is unknown", self.style.ERROR)
        elif not found.verdict.conditions:
            self.say("nothing needs attention", self.style.SUCCESS)
        if found.overview is not None:
            self._print_overview(found.overview)
        if found.server is not None:
            self.say("")
            self.say(found.server.headline())
            for headings, rows in found.server.tables():
                self.say("")
                self.print_rows(headings, rows)
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
            ["group", "topics", "consumers", "handled", "lag", "oldest", "claimed", "retrying", "dead", "timed out",
             "halted", "paused"],
            (
                (g.name, g.topics, g.consumers, g.handled, g.lag, duration(g.oldest_seconds), g.claimed or "",
                 g.retrying, g.dead, g.timed_out or "", g.blocked + g.stopped or "", "yes" if g.paused else "")
                for g in broker.groups
            ),
        )  # fmt: skip
