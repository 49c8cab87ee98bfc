"""`manage.py outbox_contract check|show|write`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Final

from django.apps import apps
from django.core.management.base import CommandError, CommandParser
from django.utils.module_loading import module_has_submodule

from outbox.contrib.django.management.output import OutboxCommand
from outbox.contrib.django.settings.conf import chosen
from outbox.contrib.django.subscribers.registry import autodiscover
from outbox.errors import ConfigurationError
from outbox.events.contract import check, declared_contracts, json_schema, read_contracts, write_contracts, written
from outbox.events.declaration import EventType, events
from outbox.utils.safe_text import error_line

_FOLDER: Final = "contracts"
_MODULE: Final = "events"


class Command(OutboxCommand):
    help = (
        "Compare the declared types of events with the committed contracts. `check` ends with exit code 1 if a change "
        "breaks a reader."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        subcommands = parser.add_subparsers(dest="do", required=True, metavar="SUBCOMMAND")
        found = subcommands.add_parser("check", help="refuse changes that break readers, and uncommitted types")
        self._add_folder(found)
        self.add_json(found)
        found = subcommands.add_parser("show", help="print the JSON Schemas of the declared events, for other teams")
        found.add_argument("events", nargs="*", metavar="EVENT", help="only these events")
        found = subcommands.add_parser("write", help="write the declared types into the folder, to be committed")
        self._add_folder(found)
        found.add_argument(
            "--force", action="store_true", help="write changes too that `check` refuses, and forget older revisions"
        )

    def _add_folder(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--folder", type=Path, default=Path(_FOLDER), help="the committed contracts (default: %(default)s)"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        getattr(self, f"_{options['do']}")(options, declared_events())

    def _check(self, options: dict[str, Any], declared: list[Any]) -> None:
        problems = check(read_contracts(options["folder"]), declared_contracts())
        if options["json"]:
            self.print_json(problems)
        if problems:
            raise CommandError(
                "\n".join(["the events and the committed contracts do not fit together.", *map(str, problems)]),
                returncode=1,
            )
        if not options["json"]:
            self.say(f"{len(declared)} versions of events fit the contracts in {options['folder']}.")

    def _show(self, options: dict[str, Any], declared: list[Any]) -> None:
        by_name: dict[str, list[EventType]] = {}
        for one in declared:
            by_name.setdefault(one.name, []).append(one)
        found = chosen("the code", by_name, options["events"], "with @event")
        self.print_json([json_schema(one) for versions in found.values() for one in versions])

    def _write(self, options: dict[str, Any], declared: list[Any]) -> None:
        committed, today = read_contracts(options["folder"]), declared_contracts()
        merged = written(committed, today)
        if options["force"]:
            for name, contract in today.items():
                merged[name].versions.update(contract.versions)
        elif problems := check(merged, today):
            raise CommandError(
                "\n".join(
                    [
                        "nothing was written, because a change breaks a reader. If no message of the old form is "
                        "stored and no code of it runs, pass --force.",
                        *map(str, problems),
                    ]
                )
            )
        changed = write_contracts(options["folder"], merged)
        for path in changed:
            self.say(f"{path} is written: commit it.")
        if not changed:
            self.say(f"{options['folder']} is up to date.")


def declared_events() -> list[EventType]:
    """Import the subscribers and the module `events` of every app, and return all declared events.

    Raises ConfigurationError if a module cannot be imported.
    """
    autodiscover()
    for app in apps.get_app_configs():
        if app.module is None or app.name.startswith("django.") or not module_has_submodule(app.module, _MODULE):
            continue
        try:
            import_module(f"{app.name}.{_MODULE}")
        except Exception as error:
            raise ConfigurationError(
                f"the events in {app.name}.{_MODULE} cannot be imported: {error_line(error)}."
            ) from error
    return events()
