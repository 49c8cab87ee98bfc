"""`manage.py outbox_contract check|show|write|asyncapi`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from django.core.management.base import CommandError, CommandParser

from outbox.contrib.django.management.output import OutboxCommand
from outbox.contrib.events.project import declared_events, service_document
from outbox.events.asyncapi import json_schema
from outbox.events.contract import check, declared_contracts, read_contracts, shown, write_contracts, written

_FOLDER: Final = "contracts"


class Command(OutboxCommand):
    """Parses the arguments, then calls the function of the chosen subcommand."""

    help = (
        "Compare the declared types of events with the committed contracts. `check` ends with exit code 1 if a change "
        "breaks a reader."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        chosen = parser.add_subparsers(dest="do", required=True, metavar="SUBCOMMAND")
        found = chosen.add_parser("check", help="refuse changes that break readers, and types that are not committed")
        self._add_folder(found)
        self.add_json(found)
        found = chosen.add_parser("show", help="print the declared events and their versions as JSON")
        found.add_argument("events", nargs="*", metavar="EVENT", help="only these events")
        found.add_argument("--schema", action="store_true", help="print JSON Schemas for other teams")
        found = chosen.add_parser("write", help="write the declared types into the folder, to be committed")
        self._add_folder(found)
        found.add_argument(
            "--force", action="store_true", help="write changes too that `check` refuses, and forget older revisions"
        )
        found = chosen.add_parser("asyncapi", help="print the AsyncAPI 3 document of this service")
        found.add_argument("--title", help="the title of the document (default: the producer group)")
        found.add_argument("--api-version", default="1.0.0", help="its version (default: %(default)s)")

    def _add_folder(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--folder", type=Path, default=Path(_FOLDER), help="the committed contracts (default: %(default)s)"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        declared = declared_events()
        getattr(self, f"_{options['do']}")(options, declared)

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
        names = options["events"]
        found: Any = shown(declared_contracts(), names)
        if options["schema"]:
            found = [json_schema(one) for one in declared if not names or one.name in names]
        self.print_json(found)

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

    def _asyncapi(self, options: dict[str, Any], declared: list[Any]) -> None:
        document = service_document(title=options["title"], version=options["api_version"])
        self.print_json(document)
