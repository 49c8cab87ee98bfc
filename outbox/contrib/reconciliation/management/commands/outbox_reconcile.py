"""`manage.py outbox_reconcile`: runs the reconciliation on Spark, in its own process, on the project's databases."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import CommandError, CommandParser
from django.db import DatabaseError

from outbox.contrib.django.actions.cells import first_line
from outbox.contrib.django.database.aliases import alias_conninfo
from outbox.contrib.django.management.output import OutboxCommand
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.reconciliation.findings import MAX_SAVED, replace
from outbox.errors import ConfigurationError

# The possible names of the reconciliation's package: the first is the name of the installed package, the second is the
# name in a checkout of this project.
_PACKAGES = ("outbox_spark", "spark")
# The exit codes of the reconciliation. A CommandError needs its own exit code, because its default exit code 1 would
# mean "findings".
_CLEAN, _FINDINGS, _USAGE, _INCOMPLETE = range(4)


class Command(OutboxCommand):
    """Parses the arguments, starts the reconciliation process, and ends with the exit code of this process."""

    help = (
        "Compare business tables, messages and effects with Spark. Exit codes: 0 no findings, 1 findings, 2 an "
        "operator must first correct something, such as rules or permissions, 3 the run could not judge everything."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--rules", default="reconcile.toml", help="the rules file (default: %(default)s)")
        parser.add_argument("--output", default="reconcile", help="folder of the results (default: %(default)s)")
        parser.add_argument(
            "--database",
            action="append",
            default=[],
            metavar="NAME=ALIAS",
            help="set $RECONCILE_NAME in the rules to the connection string of this alias (repeatable); the rules "
            "also have a variable with the name of each PostgreSQL alias, and $RECONCILE_BROKER",
        )
        parser.add_argument("--from", dest="since", help="judge rows from this time on (ISO 8601), with --to")
        parser.add_argument("--to", dest="until", help="judge rows before this time")
        parser.add_argument("--full", action="store_true", help="read everything again")
        parser.add_argument(
            "--look-back",
            nargs="?",
            const="",
            metavar="DURATION",
            help="judge the last DURATION again, as in 7d (default: the rules' look_back)",
        )
        parser.add_argument("--metrics", help="write a Prometheus textfile with this name, or into this folder")
        parser.add_argument(
            "--plan",
            type=Path,
            metavar="FILE",
            help="write a repair plan for the findings into this file, as input for outbox_repair; changes no data",
        )
        parser.add_argument(
            "--save",
            action="store_true",
            help="also save the findings and their repair plan in tables, for conditions and the operations page",
        )
        self.add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        command = [sys.executable, "-m", package(), "run", *arguments(options)]
        variables = {**project(), **os.environ, **given(options["database"])}
        done = subprocess.run(command, env=variables, check=False)
        if done.returncode in (_CLEAN, _FINDINGS):
            if options["save"]:
                self.save(options, variables)
            if options["plan"]:
                self.plan(options["plan"], options["rules"], options["output"], variables)
        if done.returncode:
            raise SystemExit(done.returncode)

    def save(self, options: Mapping[str, Any], variables: Mapping[str, str]) -> None:
        """Replace the saved result of the output folder: the findings, the plan of their repair, and their causes.

        If this method raises CommandError, the result in the folder is still valid.
        """
        output, most = options["output"], ["--limit", str(MAX_SAVED + 1)]
        problem = f"The result is in {output}, but its findings were not saved in the table"
        lines = self._printed(["findings", "--output", output, *most], variables, problem)
        planned = self._printed(["plan", "--rules", options["rules"], "--output", output, *most], variables, problem)
        try:
            saved = replace(output, lines[:MAX_SAVED], planned, aliases(options["database"]))
        except DatabaseError as error:
            raise CommandError(
                f"{problem}: {first_line(str(error))}. If a table is missing, run manage.py migrate. Then run "
                "this command again.",
                returncode=_INCOMPLETE,
            ) from error
        rest = f"; the table has only these findings, and {output} has all" if len(lines) > MAX_SAVED else ""
        self.stderr.write(f"saved {saved} findings in the table{rest}")

    @staticmethod
    def _printed(arguments: Sequence[str], variables: Mapping[str, str], problem: str) -> list[str]:
        command = [sys.executable, "-m", package(), *arguments]
        printed = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=False)
        if printed.returncode:
            raise CommandError(f"{problem}, because they cannot be read: see the error above.", returncode=_INCOMPLETE)
        return printed.stdout.splitlines()

    def plan(self, file: Path, rules: str, output: str, variables: Mapping[str, str]) -> None:
        """Write a repair plan for the findings in the folder `output`.

        If this method raises CommandError, the findings in `output` are still valid.
        """
        command = [sys.executable, "-m", package(), "plan", "--rules", rules, "--output", output]
        printed = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=False)
        if printed.returncode:
            raise CommandError(
                f"The result is in {output}, but making a plan failed: see the error above.",
                returncode=printed.returncode,
            )
        try:
            file.touch(mode=0o600)  # Only the owner may read the plan, because it contains the findings' texts.
            file.write_text(printed.stdout, encoding="utf-8")
        except OSError as error:
            raise CommandError(
                f"The result is in {output}, but the plan of this result cannot be written: {error}.", returncode=_USAGE
            ) from error
        self.stderr.write(f"plan: {file}; read it, then: python manage.py outbox_repair {file}")


def package() -> str:
    """Return the name of the reconciliation's module. Raises CommandError if the module is not installed."""
    for name in _PACKAGES:
        if importlib.util.find_spec(name) and importlib.util.find_spec(f"{name}.cli"):
            return name
    raise CommandError(
        "reconciliation is not installed here: pip install 'outbox-transactional[spark]'.", returncode=_USAGE
    )


def arguments(options: Mapping[str, Any]) -> list[str]:
    """Return the command line arguments for `outbox-reconcile run`."""
    named = {"--rules": "rules", "--output": "output", "--from": "since", "--to": "until", "--metrics": "metrics"}
    parts = [part for flag, name in named.items() if options[name] for part in (flag, options[name])]
    if options["look_back"] is not None:
        parts += ["--look-back", *([options["look_back"]] if options["look_back"] else [])]
    return [*parts, *[f"--{name}" for name in ("full", "json") if options[name]]]


def project() -> dict[str, str]:
    """Return RECONCILE_… variables with the connection strings of the project's aliases.

    If the environment already has a variable of the same name, the environment's value is used.
    """
    variables = {}
    for alias, database in settings.DATABASES.items():
        if str(database.get("ENGINE", "")).rpartition(".")[2] in ("postgresql", "postgis"):
            variables[_variable(alias)] = alias_conninfo(alias)
    variables[_variable("broker")] = alias_conninfo(get_settings().broker)
    return variables


def given(databases: Sequence[str]) -> dict[str, str]:
    """Return RECONCILE_… variables made from the option --database.

    These variables override variables of the environment. Raises CommandError for unknown aliases.
    """
    variables = {}
    for item in databases:
        name, separator, alias = item.partition("=")
        if not separator or not name.isidentifier():
            raise CommandError(
                f"--database {item}: write NAME=ALIAS, as in --database orders=default.", returncode=_USAGE
            )
        try:
            variables[_variable(name)] = alias_conninfo(alias)
        except ConfigurationError as error:
            raise CommandError(f"--database {item}: {error}", returncode=_USAGE) from error
    return variables


def aliases(databases: Sequence[str]) -> dict[str, str]:
    """Return the alias of each database that the option --database names."""
    return {name: alias for name, _, alias in (item.partition("=") for item in databases)}


def _variable(name: str) -> str:
    return "RECONCILE_" + "".join(letter if letter.isalnum() else "_" for letter in name.upper())
