"""`manage.py outbox_install [--drop]`."""

from __future__ import annotations

import argparse
import math
from typing import Any

from django.core.management.base import CommandError, CommandParser

from outbox.broker.schema.install import DEFAULT_PATIENCE_SECONDS
from outbox.contrib.django.engine.broker import engine_of
from outbox.contrib.django.management.output import OutboxCommand
from outbox.contrib.django.operations.installation import install_broker, planned_installation, remove_broker
from outbox.contrib.django.settings.conf import OutboxSettings, get_settings


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, at least 0")
    return seconds


class Command(OutboxCommand):
    """Parses, then calls one function."""

    help = "Install or upgrade the broker's tables and declare OUTBOX['TOPICS'], as `migrate` does; or drop them."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--drop", action="store_true", help="remove the broker's tables with all messages")
        parser.add_argument("--force", action="store_true", help="drop undelivered messages too")
        parser.add_argument(
            "--patience",
            type=_seconds,
            default=DEFAULT_PATIENCE_SECONDS,
            metavar="SECONDS",
            help="how long each change is tried while transactions use its tables (default: %(default).0f)",
        )
        self.add_dry_run(parser, "show what would be done, change nothing")

    def handle(self, *args: Any, **options: Any) -> None:
        settings = get_settings()
        engine_of(settings).refusals.require("install", "outbox_install")
        if options["force"] and not options["drop"]:
            raise CommandError("--force needs --drop: an installation deletes nothing.")
        if options["drop"]:
            self._drop(settings, **{name: options[name] for name in ("force", "dry_run", "patience")})
            return
        if options["dry_run"]:
            before, after = planned_installation(settings)
        else:
            before, after = install_broker(settings, patience_seconds=options["patience"], report=self.say)
        where = f"schema {settings.schema!r} on {settings.broker!r}"
        would = "would be " if options["dry_run"] else ""
        change = f"is at version {after}" if before == after else f"{would}brought from version {before} to {after}"
        topics = ", ".join(sorted(settings.topics)) or "none"
        self.say(f"the broker's {where} {change}; topics {would}declared: {topics}")

    def _drop(self, settings: OutboxSettings, *, force: bool, dry_run: bool, patience: float) -> None:
        left = remove_broker(settings, force=force, dry_run=dry_run, patience_seconds=patience, report=self.say)
        would = "would be" if dry_run else "was"
        self.say(f"the broker's schema {settings.schema!r} on {settings.broker!r} {would} dropped")
        for what in left:
            self.say(f"lost with it: {what}")
        self.say("`migrate` installs it again: remove the app from INSTALLED_APPS, or name another broker")
