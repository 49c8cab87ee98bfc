"""`manage.py outbox_doctor`: finds problems in the project, and prints each problem with its remedy."""

from __future__ import annotations

import sys
from typing import Any

from django.core.management.base import CommandError, CommandParser

from outbox.broker.operations.conditions import Severity
from outbox.broker.schema.grants import Role
from outbox.contrib.django.management.output import OutboxCommand
from outbox.contrib.django.operations.doctor import examine, examine_rights
from outbox.errors import ConfigurationError


class Command(OutboxCommand):
    help = (
        "Examine settings, databases, ledgers, server and declarations. Exit codes: 0 (also if a result only informs), "
        "1 (warning) or 2 (critical)."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        self.add_json(parser)
        parser.add_argument(
            "--for",
            dest="role",
            choices=tuple(Role),
            type=Role,
            help="only check the rights of the connected roles: to publish, to work, to watch or to own the tables",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            results = examine_rights(options["role"]) if options["role"] else examine()
        except ConfigurationError as error:
            raise CommandError(str(error)) from error
        found = sorted(results, key=lambda one: -one.severity)
        if options["json"]:
            self.print_json([one.as_json() for one in found])
        else:
            for one in found:
                self.print_condition(one)
        worst = max((one.severity for one in found), default=Severity.OK)
        if worst:
            sys.exit(int(worst))
