"""Shared parts of the commands: errors in one line, and output as text or JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import Error as DatabaseError

from outbox.broker.database.executor import Row
from outbox.broker.operations.conditions import Condition, Severity, as_facts
from outbox.contrib.django.actions.cells import first_line
from outbox.contrib.django.engine.broker import reset_broker
from outbox.contrib.django.operations.known_conditions import observer
from outbox.errors import ConfigurationError, OutboxError
from outbox.utils.safe_text import for_people, inert

# The exit code that a shell shows for a program that SIGPIPE has ended: 128 + 13.
_CLOSED_PIPE: Final = 141
# Options that choose a declared action, in commands without subcommands.
_ACTING: Final = ("drop",)


class OutboxCommand(BaseCommand):
    """The base class of the outbox commands: it prints an OutboxError or a database error without a traceback."""

    # A command that mends something must run even if a check fails.
    requires_system_checks: tuple[str, ...] = ()

    def add_json(self, parser: CommandParser) -> None:
        parser.add_argument("--json", action="store_true", help="print JSON instead of text")

    @property
    def command_name(self) -> str:
        """The name that an operator writes in a shell to run this command."""
        return type(self).__module__.rpartition(".")[2]

    def execute(self, *args: Any, **options: Any) -> str | None:
        try:
            if refusal := self._refusal(options):
                raise CommandError(refusal)
            found = super().execute(*args, **options)
            self.stdout.flush()
            return found
        except BrokenPipeError:
            # The reader, such as `head`, has closed the pipe. Writing Python's output buffer at exit would fail.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(_CLOSED_PIPE)
        except OutboxError as error:
            raise CommandError(for_people(str(error))) from error
        except DatabaseError as error:
            raise CommandError(
                f"a database of the application did not execute the request: {first_line(error)}. If a table is "
                "missing, run `manage.py migrate`. If this login lacks a right, use the login of a worker."
            ) from error
        except CommandError as error:
            raise CommandError(for_people(str(error)), returncode=error.returncode) from error
        finally:
            # Reports the decisions that background threads could not send.
            reset_broker()

    def _refusal(self, options: Mapping[str, Any]) -> str:
        """Why the command does not work on the engine of the settings; '' if it works."""
        option = next((f"--{name.replace('_', '-')}" for name in _ACTING if options.get(name)), "")
        subcommand = options.get("action") or option
        try:
            server = observer()
            return "" if server is None else server.refused_command(f"{self.command_name} {subcommand}".rstrip())
        except ConfigurationError:
            # The command reports wrong settings itself, or works without them.
            return ""

    def confirm(self, what: str, options: Mapping[str, Any]) -> None:
        """Ask the operator to confirm `what`. Raises CommandError if the answer is not "yes"."""
        if options["no_input"]:
            return
        try:
            answer = input(inert(f"{what} Type 'yes' to continue: ", keep="\n"))
        except EOFError:
            raise CommandError(f"{what} Standard input is closed, so nothing was changed: pass --no-input.") from None
        if answer.strip() != "yes":
            raise CommandError("nothing was changed.")

    def print_condition(self, condition: Condition) -> None:
        styles = {Severity.WARNING: self.style.WARNING, Severity.CRITICAL: self.style.ERROR}
        said = f"{condition.severity.name} {condition.name}: {first_line(condition.meaning)}"
        self.say(said, styles.get(condition.severity))
        for fact in condition.evidence:
            if fact:
                self.say(f"    {first_line(as_facts(fact))}")
        if condition.count > len(condition.evidence):
            self.say(f"    and {condition.count - len(condition.evidence)} more")
        if condition.next_step:
            self.say(f"    -> {condition.next_step}")

    def say(self, text: str, style: Callable[[str], str] | None = None) -> None:
        """Print one line, with control characters escaped. All text output uses this method."""
        self.stdout.write(inert(text), style)

    def print_json(self, value: Any) -> None:
        """Print dataclasses, mappings and sequences as ASCII JSON. Times are written as ISO 8601."""
        self.stdout.write(json.dumps(value, indent=2, default=_plain))

    def print_rows(self, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Print an aligned table, or "none" if the table has no rows."""
        lines = [tuple("" if cell is None else inert(str(cell)) for cell in row) for row in rows]
        if not lines:
            self.say("none")
            return
        widths = [max(len(line[column]) for line in [tuple(header), *lines]) for column in range(len(header))]
        for line in [tuple(header), *lines]:
            self.say("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _plain(value: object) -> object:
    if isinstance(value, Row):
        return vars(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)
