"""The base class of commands that run declared actions.

The class implements arguments, dry run, JSON, confirmation and audit.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from typing import Any, Final
from uuid import UUID

from django.core.management.base import CommandError, CommandParser

from outbox.contrib.django.actions.audit import recorded_command
from outbox.contrib.django.actions.catalogue import of_command
from outbox.contrib.django.actions.declaration import LEFT, ActionField, ActionPlan, DeclaredAction, FieldKind
from outbox.contrib.django.management.output import OutboxCommand, moment, positive


def _number(text: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, at least 0")
    return int(text)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, at least 0")
    return seconds


_TYPES: Final[Mapping[FieldKind, Callable[[str], Any]]] = {
    FieldKind.TEXT: str,
    FieldKind.ID: UUID,
    FieldKind.NUMBER: _number,
    FieldKind.COUNT: positive,
    FieldKind.SECONDS: _seconds,
    FieldKind.TIME: moment,
}


class ActionCommand(OutboxCommand):
    """A command with subcommands.

    A subcommand runs a declared action, or calls a method of the command class. These methods only read data.
    """

    def add_subcommands(self, parser: CommandParser, *, required: bool = True) -> Any:
        """Add a subcommand for each declared action of this command.

        Returns argparse's object to which the caller can add further subcommands.
        """
        subcommands = parser.add_subparsers(dest="action", required=required)
        for action in of_command(self.command_name):
            self.add_action(subcommands.add_parser(action.subcommand, help=action.title), action)
        return subcommands

    def add_action(self, parser: CommandParser, action: DeclaredAction) -> None:
        """Add the arguments of an action to a parser."""
        groups: dict[str, Any] = {}
        for field in action.fields:
            if field.one_of and field.one_of not in groups:
                groups[field.one_of] = parser.add_mutually_exclusive_group(required=True)
            add_field(groups.get(field.one_of, parser), field)
        parser.add_argument("--reason", default="", metavar="TEXT", help="why, for the audit")
        self.add_no_input(parser, "show the plan, change nothing")
        self.add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        declared = {action.subcommand: action for action in of_command(self.command_name)}
        if options["action"] in declared:
            self.act(declared[options["action"]], options)
        else:
            getattr(self, f"_{options['action']}")(options)

    def act(self, action: DeclaredAction, options: Mapping[str, Any]) -> None:
        """Show the plan of an action, or run the action and write its audit entry. Raises CommandError."""
        plan = action.plan({field.name: _value(field, options[field.name]) for field in action.fields})
        if options["dry_run"]:
            if plan.refusal:
                raise CommandError(plan.refusal)
            self._report(action, plan, "planned", {}, options)
            left = plan.before.get(LEFT)
        elif plan.nothing:
            self._report(action, plan, "nothing", {}, options)
            left = plan.before.get(LEFT)
        else:
            if plan.dangerous:
                self.confirm(f"{plan.effect} {plan.caution}", options)
            entry, failure = recorded_command(action.name, plan, why=options["reason"])
            if failure is not None:
                raise failure
            self._report(action, plan, "done", entry.after, options)
            left = entry.after.get(LEFT)
        if left:
            raise CommandError(f"not done: {', '.join(left)}. `outbox_message show ID` shows where a message is.")

    def _report(
        self, action: DeclaredAction, plan: ActionPlan, outcome: str, after: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        if options["json"]:
            said = {"subject": plan.subject, "effect": plan.effect, "caution": plan.caution}
            states = {"before": plan.before, "after": after, "outcome": outcome, "dry_run": options["dry_run"]}
            self.print_json({"action": action.name, **said, **states})
            return
        self.say(plan.effect)
        if outcome == "done":
            self._say_state("after", after)
            self.say("Done.", self.style.SUCCESS)
            return
        if plan.caution:
            self.say(plan.caution, self.style.WARNING)
        self._say_state("before", plan.before)
        self.say("There is nothing to do." if plan.nothing else "Nothing was changed: --dry-run.")

    def _say_state(self, when: str, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            for one in value if isinstance(value, list) and value else [value]:
                self.say(f"{when}: {name.replace('_', ' ')}: {'-' if one in (None, '', []) else one}")


def add_field(parser: Any, field: ActionField) -> None:
    """Add the command line argument for a field of an action to a parser."""
    if field.kind is FieldKind.FLAG:
        parser.add_argument(f"--{field.name.replace('_', '-')}", action="store_true", help=field.help)
        return
    more: dict[str, Any] = {"help": field.help, "type": _TYPES[field.kind], "default": field.default}
    if field.choices:
        more["choices"] = field.choices
    if field.positional:
        optional = {"nargs": "*"} if field.many else {} if field.required else {"nargs": "?"}
        parser.add_argument(field.name, **more, **optional)
    elif field.many:
        parser.add_argument(f"--{field.name.replace('_', '-')}", action="append", **more)
    else:
        parser.add_argument(f"--{field.name.replace('_', '-')}", required=field.required, **more)


def _value(field: ActionField, value: Any) -> Any:
    return list(value or ()) if field.many else value
