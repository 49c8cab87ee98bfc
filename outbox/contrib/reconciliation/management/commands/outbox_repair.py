"""`manage.py outbox_repair PLAN`: verifies the steps of a repair plan. With --apply, it also applies the steps."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import Error

from outbox.contrib.django.actions.cells import first_line
from outbox.contrib.django.management.output import OutboxCommand
from outbox.contrib.django.settings.conf import imported, settings_of
from outbox.contrib.reconciliation.apply import apply
from outbox.contrib.reconciliation.plan import RepairPlan, read
from outbox.contrib.reconciliation.settings import ReconciliationSettings
from outbox.contrib.reconciliation.steps import Publisher, PublishSources, StepOutcome, sources_of
from outbox.errors import BrokerError, ConfigurationError, UsageError

_OPEN, _USAGE, _INCOMPLETE = 1, 2, 3
_FOR_PEOPLE = (StepOutcome.REFUSED, StepOutcome.REPORTED, StepOutcome.LEFT)


class Command(OutboxCommand):
    """Parses the arguments, then verifies or applies the plan. Prints the result of each step when the step ends."""

    help = (
        "Verify the steps of a plan from `outbox-reconcile plan`; with --apply, also do the steps. Exit codes: 0 no "
        "step is left, 1 some steps were refused, were not done or need a person, 2 wrong options, plan or settings, "
        "3 a database could not be reached: run the command again, which does not repeat completed steps."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """See BaseCommand."""
        parser.add_argument("plan", type=Path, help="the plan's file")
        parser.add_argument(
            "--apply", action="store_true", help="do the steps; without this option, the command only verifies them"
        )
        parser.add_argument("--reason", default="", metavar="TEXT", help="why, for the audit")
        parser.add_argument("--most", type=_positive, default=100, help="do at most this many steps (default: 100)")
        parser.add_argument(
            "--per-second", type=_rate, default=10.0, help="do at most this many steps per second (default: 10)"
        )
        parser.add_argument(
            "--publisher",
            action="append",
            default=[],
            metavar="RULE=DOTTED.PATH",
            help="the function that makes the message of a rule from a business row; it gets the row as a mapping "
            "(repeatable; default: OUTBOX['REPAIR_PUBLISHERS'])",
        )
        parser.add_argument(
            "--database",
            action="append",
            default=[],
            metavar="NAME=ALIAS",
            help="the alias of the database that the rules call NAME (repeatable; default: the alias NAME)",
        )
        self.add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        """See BaseCommand."""
        try:
            plan = read(options["plan"])
            means = _means(plan, options)
            outcomes = self._applied(plan, means, options)
        except (UsageError, ConfigurationError) as error:
            raise CommandError(str(error), returncode=_USAGE) from error
        except (BrokerError, Error) as error:
            raise CommandError(
                f"{first_line(str(error))}. The remaining steps were not done. Run the command again: it does not "
                "repeat completed steps.",
                returncode=_INCOMPLETE,
            ) from error
        if not options["json"]:
            self.say(", ".join(f"{count} {name}" for name, count in outcomes.items()) or "the plan has no steps")
        if any(outcomes[name.value] for name in _FOR_PEOPLE):
            raise SystemExit(_OPEN)

    def _applied(self, plan: RepairPlan, means: PublishSources, options: dict[str, Any]) -> Counter[str]:
        given = {name: options[name] for name in ("most", "per_second")}
        reason = options["reason"] if options["apply"] else None
        outcomes: Counter[str] = Counter()
        for step, result in apply(plan, means, **given, reason=reason):
            outcomes[result.outcome.value] += 1
            if options["json"]:
                self.say(json.dumps({"step": asdict(step), "result": asdict(result)}, default=str))
            else:
                subject = f"{step.rule}, key {step.key}" + (f", group {step.group}" if step.group else "")
                content = f": {result.content}" if result.content else ""
                self.say(f"{step.finding_class} {subject}: {result.outcome.value}: {result.detail}{content}")
        return outcomes


def _means(plan: RepairPlan, options: dict[str, Any]) -> PublishSources:
    paths = {**settings_of(ReconciliationSettings).repair_publishers, **dict(map(_pair, options["publisher"]))}
    publishers = {rule: _publisher(rule, path) for rule, path in paths.items()}
    given = dict(map(_pair, options["database"]))
    return sources_of(plan.steps, plan.sources, given, publishers, how="pass --database {name}=ALIAS.")


def _publisher(rule: str, path: str) -> Publisher:
    function: Publisher = imported(f"--publisher {rule!r}", path)
    return function


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.rpartition("=")
    if not separator or not name or not value:
        raise UsageError(f"{text!r}: write NAME=VALUE.")
    return name, value


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps: pass a whole number, at least 1.")
    return int(text)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate <= 10_000:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of steps per second: pass a number above 0, at most 10000."
        )
    return rate
