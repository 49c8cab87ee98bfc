"""`manage.py outbox_topic create|alter|delete|list`."""

from __future__ import annotations

import dataclasses
from typing import Any

from django.core.management.base import CommandParser

from outbox.broker.database.executor import Executor
from outbox.broker.log.topics import list_topics
from outbox.contrib.django.database.aliases import broker_connection
from outbox.contrib.django.engine.operator_table import is_on_rocketmq
from outbox.contrib.django.management.acting import ActionCommand


class Command(ActionCommand):
    """Parses the arguments, then calls the function of the chosen subcommand."""

    help = "Create, alter, delete or list the topics of the broker. `migrate` declares the topics of OUTBOX['TOPICS']."

    def add_arguments(self, parser: CommandParser) -> None:
        self.add_json(self.add_subcommands(parser).add_parser("list", help="list every topic of the broker"))

    def _list(self, options: dict[str, Any]) -> None:
        if is_on_rocketmq():
            self._list_of_server(options)
            return
        with broker_connection() as (connection, schema):
            topics = list_topics(Executor(connection, schema))
        if options["json"]:
            self.print_json([{**dataclasses.asdict(topic), "types": sorted(topic.types)} for topic in topics])
            return
        self.print_rows(
            ["topic", "types", "queues", "retention s", "key lock", "on park"],
            (
                (t.name, "+".join(sorted(t.types)), t.queue_count, t.retention_seconds, t.key_lock, t.on_park)
                for t in topics
            ),
        )

    def _list_of_server(self, options: dict[str, Any]) -> None:
        from outbox.contrib.django.operations.rocketmq import brokers
        from outbox.contrib.django.settings.conf import get_settings
        from outbox.rocketmq.inspection import topic_figures

        rows = [dataclasses.asdict(one) for one in topic_figures(brokers(), sorted(get_settings().topics))]
        if options["json"]:
            self.print_json(rows)
        else:
            self.print_rows(["topic", "queues", "stored", "written"], (tuple(row.values()) for row in rows))
