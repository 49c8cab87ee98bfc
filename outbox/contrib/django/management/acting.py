"""The base class of commands that run declared actions and print declared listings.

Each declared action and listing of the command is a subcommand. A command has a `help` about their subject and nothing
else, unless it has subcommands of its own:

    class Command(OperatorCommand):
        help = "Show consumer groups, and act on them."
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Final

from django.core.management.base import CommandError, CommandParser

from outbox.contrib.django.actions.audit import recorded_command
from outbox.contrib.django.actions.cells import plain
from outbox.contrib.django.actions.declaration import LEFT, ActionPlan, DeclaredAction, Field, FieldKind, parsed
from outbox.contrib.django.actions.listing import COMMAND, Asked, Listing
from outbox.contrib.django.catalogue import listings_of, of_command, on_engine
from outbox.contrib.django.database.aliases import broker_executor, one_connection
from outbox.contrib.django.management.output import OutboxCommand


def _parser(kind: FieldKind) -> Callable[[str], Any]:
    """The function that parses the values of a field for argparse."""

    def parse(text: str) -> Any:
        try:
            return parsed(kind, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


_LIMIT: Final = Field("limit", "show at most this number of rows (default: %(default)s)", FieldKind.COUNT, default=100)


class OperatorCommand(OutboxCommand):
    """A command whose subcommands are declared actions, declared listings, and methods that only read data."""

    def add_arguments(self, parser: CommandParser) -> None:
        self.add_subcommands(parser)

    def add_subcommands(self, parser: CommandParser, *, required: bool = True) -> Any:
        """Add a subcommand for each listing and each declared action. The caller can add more to the result."""
        subcommands = parser.add_subparsers(dest="action", required=required)
        for word, listing in listings_of(self.command_name).items():
            self.add_listing(subcommands.add_parser(word, help=listing.help), listing)
        for action in of_command(self.command_name):
            self.add_action(subcommands.add_parser(action.subcommand, help=action.title), action)
        return subcommands

    def add_listing(self, parser: CommandParser, listing: Listing) -> None:
        for field in listing.fields:
            add_field(parser, field)
        if listing.states:
            names = [name for name in listing.states if name]
            parser.add_argument("--state", choices=names, default="", help="list only the rows in this state")
        if listing.after is not None:
            add_field(parser, _LIMIT)
            add_field(parser, listing.after)
        self.add_json(parser)

    def add_action(self, parser: CommandParser, action: DeclaredAction) -> None:
        groups: dict[str, Any] = {}
        for field in action.fields:
            if field.one_of and field.one_of not in groups:
                groups[field.one_of] = parser.add_mutually_exclusive_group(required=True)
            add_field(groups.get(field.one_of, parser), field)
        parser.add_argument("--reason", default="", metavar="TEXT", help="why, for the audit")
        parser.add_argument("--dry-run", action="store_true", help="show the plan, change nothing")
        parser.add_argument("--no-input", action="store_true", help="run the action without asking for a confirmation")
        self.add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        word = options["action"]
        declared = {action.subcommand: action for action in of_command(self.command_name)}
        if word in declared:
            self.act(declared[word], options)
        elif listing := listings_of(self.command_name).get(word):
            with one_connection():
                self.print_listing(on_engine(listing), options)
        else:
            getattr(self, f"_{word}")(options)

    def print_listing(self, listing: Listing, options: Mapping[str, Any]) -> None:
        fields = [*listing.fields, *([listing.after] if listing.after else [])]
        limit = options["limit"] if listing.after else 0
        asked = Asked({one.name: options[one.name] for one in fields}, limit, broker_executor, nullcontext)
        with listing.opened(asked) as run:
            found = listing.read(run, asked)
        if listing.states:
            found = list(filter(listing.states[options["state"]][1], found))
        if options["json"]:
            self.print_json([listing.as_json(one) for one in found])
            return
        columns = listing.on(COMMAND, {})
        self.print_rows(
            [one.label.lower() for one in columns], ([plain(one.of(row)) for one in columns] for row in found)
        )
        if listing.after is not None and len(found) >= limit:
            place = listing.position and listing.position(found[-1])
            self.say(f"there may be more rows: pass {'a higher --limit' if place is None else f'--after {place}'}")

    def act(self, action: DeclaredAction, options: Mapping[str, Any]) -> None:
        """Show the plan of an action, or run the action and write its audit entry. Raises CommandError."""
        plan = action.plan({field.name: _value(field, options[field.name]) for field in action.fields})
        if options["dry_run"] and plan.refusal:
            raise CommandError(plan.refusal)
        if options["dry_run"] or plan.nothing:
            self._report(action, plan, "planned" if options["dry_run"] else "nothing", {}, options)
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


def add_field(parser: Any, field: Field) -> None:
    if field.kind is FieldKind.FLAG:
        parser.add_argument(f"--{field.name.replace('_', '-')}", action="store_true", help=field.help)
        return
    more: dict[str, Any] = {"help": field.help, "type": _parser(field.kind), "default": field.default}
    if field.choices:
        more["choices"] = field.choices
    if field.positional:
        optional = {"nargs": "*"} if field.many else {} if field.required else {"nargs": "?"}
        parser.add_argument(field.name, **more, **optional)
    elif field.many:
        parser.add_argument(f"--{field.name.replace('_', '-')}", action="append", **more)
    else:
        parser.add_argument(f"--{field.name.replace('_', '-')}", required=field.required, **more)


def _value(field: Field, value: Any) -> Any:
    return list(value or ()) if field.many else value
