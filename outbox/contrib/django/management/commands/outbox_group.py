"""`manage.py outbox_group list|offsets|pause|resume|skip|reset|limits|rename|delete`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

from django.core.management.base import CommandParser

from outbox.broker.database.executor import Executor
from outbox.broker.groups.registration import group_id_of
from outbox.broker.operations.progress import QueueProgress, list_queues
from outbox.contrib.django.database.aliases import broker_connection
from outbox.contrib.django.engine.operator_table import is_on_rocketmq
from outbox.contrib.django.management.acting import ActionCommand
from outbox.contrib.django.management.output import first_line

_COUNTERS: Final = ("handled", "skipped", "filtered", "sent_back", "dead", "expired")


class Command(ActionCommand):
    """Parses the arguments, then calls the function of the chosen subcommand."""

    help = "List, pause, resume, reset, limit, rename or delete consumer groups; skip a message."

    def add_arguments(self, parser: CommandParser) -> None:
        subcommands = self.add_subcommands(parser)
        self.add_json(subcommands.add_parser("list", help="list every group with its lag"))
        offsets = subcommands.add_parser(
            "offsets", help="show each queue of a group: position, end, owner, and the error that blocks it"
        )
        offsets.add_argument("group")
        self.add_json(offsets)

    def _list(self, options: dict[str, Any]) -> None:
        if is_on_rocketmq():
            self._list_of_server(options)
            return
        by_group: dict[str, list[QueueProgress]] = {}
        with broker_connection() as (connection, schema):
            for queue in list_queues(Executor(connection, schema)):
                by_group.setdefault(queue.group, []).append(queue)
        rows = [
            {
                "group": group,
                "queues": len(queues),
                "lag": sum(queue.lag for queue in queues),
                "stopped": sum(queue.stopped is not None for queue in queues),
                "blocked": sum(queue.blocked_by is not None for queue in queues),
            }
            for group, queues in by_group.items()
        ]
        if options["json"]:
            self.print_json(rows)
        else:
            self.print_rows(["group", "queues", "lag", "stopped", "blocked"], (tuple(row.values()) for row in rows))

    def _list_of_server(self, options: dict[str, Any]) -> None:
        from outbox.contrib.django.operations.rocketmq import brokers, pairs
        from outbox.rocketmq.inspection import group_figures

        rows = [dataclasses.asdict(one) for one in group_figures(brokers(), pairs())]
        self._print(rows, options)

    def _offsets_on_server(self, options: dict[str, Any]) -> None:
        from outbox.contrib.django.operations.rocketmq import brokers, topics_of
        from outbox.rocketmq.inspection import offsets

        group = options["group"]
        self._print(offsets(brokers(), group, topics_of(group)), options)

    def _print(self, rows: Sequence[Mapping[str, object]], options: dict[str, Any]) -> None:
        if options["json"]:
            self.print_json(rows)
        else:
            self.print_rows(list(rows[0]) if rows else [], (tuple(row.values()) for row in rows))

    def _offsets(self, options: dict[str, Any]) -> None:
        if is_on_rocketmq():
            self._offsets_on_server(options)
            return
        with broker_connection() as (connection, schema):
            group_id_of(Executor(connection, schema), options["group"])
            queues = list_queues(Executor(connection, schema), options["group"])
        if options["json"]:
            self.print_json([{**dataclasses.asdict(queue), "lag": queue.lag} for queue in queues])
            return
        self.print_rows(
            ["topic", "queue", "offset", "end", "lag", *_COUNTERS, "owner", "stopped or blocked by"],
            (
                (
                    *(q.topic, q.number, q.next_offset, q.head, q.lag),
                    *(getattr(q, name) for name in _COUNTERS),
                    *(q.owner, first_line(q.stopped or q.blocked_error)),
                )
                for q in queues
            ),
        )
