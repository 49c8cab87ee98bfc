"""`manage.py outbox_install [--grants | --drop]`: checks or installs the broker and its roles.

On PostgreSQL the broker consists of tables. On the server of another engine, it consists of topics and groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import psycopg
from django.core.management.base import CommandError, CommandParser
from django.db.utils import DatabaseError

from outbox.broker.schema.grants import Role
from outbox.contrib.django.catalogue import ACTIONS
from outbox.contrib.django.engine.broker import engine_of
from outbox.contrib.django.management.acting import OperatorCommand
from outbox.contrib.django.operations.granting import grant, planned_grants
from outbox.contrib.django.operations.installation import install_broker, planned_installation
from outbox.contrib.django.operations.known_conditions import observer
from outbox.contrib.django.settings.conf import OutboxSettings, get_settings
from outbox.contrib.django.subscribers.registry import autodiscover


class Command(OperatorCommand):
    """Parses the arguments, then installs, checks or drops the broker's tables, or lets an engine check its server.

    An engine with a server compares its topics with the declared topics. With --create, it first creates the declared
    topics and groups.
    """

    help = (
        "Install or upgrade the broker's tables and declare the topics of OUTBOX['TOPICS'], as `migrate` does. With "
        "--drop, drop the tables. If the broker is the server of another engine, check its topics; with --create, "
        "first create the topics and the consumer groups."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--drop", action="store_true", help="remove the broker's tables with all messages")
        parser.add_argument(
            "--create",
            nargs="?",
            const="",
            metavar="HOST:PORT",
            help="first create topics and groups on all servers in OUTBOX['BROKER'], if that is the address of another "
            "engine, or on the one with this administration port",
        )
        parser.add_argument(
            "--grants",
            action="store_true",
            help="make the database roles publish, work, watch and own, and give them their rights; with --dry-run, "
            "print the SQL",
        )
        for role in Role:
            parser.add_argument(
                f"--{role}",
                metavar="ROLE",
                action="append",
                default=[],
                help=f"with --grants: a role of the server that becomes a member of the role {role}; repeatable",
            )
        self.add_action(parser, ACTIONS["drop_broker"])

    def handle(self, *args: Any, **options: Any) -> None:
        settings = get_settings()
        creates = options["create"] is not None
        if (options["force"] or options["part"]) and not options["drop"]:
            given = "--force" if options["force"] else "--part"
            raise CommandError(f"{given} needs --drop: an installation deletes nothing.")
        if creates and options["dry_run"]:
            raise CommandError(
                "--create cannot be used with --dry-run: leave --create out, then the command only checks the topics."
            )
        if (server := observer()) is not None:
            autodiscover()
            server.install(options["create"], say=self.say)
            return
        engine_of(settings).refusals.require("install", "outbox_install")
        members = {role: options[role.value] for role in Role}
        if options["grants"]:
            self._grant(settings, members, options)
            return
        if any(members.values()):
            raise CommandError("--publish, --work, --watch and --own need --grants.")
        if creates:
            raise CommandError(
                "OUTBOX['BROKER'] is an alias of DATABASES, so the topics need no --create: leave it out."
            )
        if options["drop"]:
            self.act(ACTIONS["drop_broker"], options)
        else:
            self._install(settings, options)

    def _grant(
        self, settings: OutboxSettings, members: Mapping[Role, Sequence[str]], options: Mapping[str, Any]
    ) -> None:
        if options["dry_run"]:
            done = planned_grants(settings, members)
        else:
            try:
                done = grant(settings, members, patience_seconds=options["patience"])
            except (psycopg.Error, DatabaseError) as error:
                raise CommandError(
                    f"the rights were not granted: {str(error).strip()}. Run this command as a role with CREATEROLE "
                    "that owns the tables, or give the SQL of `outbox_install --grants --dry-run` to such a role."
                ) from error
        if options["json"]:
            databases: dict[str, list[str]] = {}
            for alias, statements in done:
                databases.setdefault(alias, []).extend(statements)
            self.print_json({"databases": databases, "dry_run": options["dry_run"]})
            return
        for alias, statements in done:
            self.say(f"-- database {alias!r}")
            for statement in statements:
                self.say(f"{statement};")

    def _install(self, settings: OutboxSettings, options: Mapping[str, Any]) -> None:
        if options["dry_run"]:
            before, after = planned_installation(settings)
        else:
            report = self.stderr.write if options["json"] else self.say
            before, after = install_broker(settings, patience_seconds=options["patience"], report=report)
        if options["json"]:
            found = {"schema": settings.schema, "database": settings.broker, "topics": sorted(settings.topics)}
            self.print_json({**found, "before": before, "after": after, "dry_run": options["dry_run"]})
            return
        where = f"schema {settings.schema!r} on {settings.broker!r}"
        would = "would be " if options["dry_run"] else ""
        change = f"is at version {after}" if before == after else f"{would}brought from version {before} to {after}"
        topics = ", ".join(sorted(settings.topics)) or "none"
        self.say(f"the broker's {where} {change}; topics {would}declared: {topics}")
