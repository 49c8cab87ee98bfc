"""`manage.py outbox_finding list|repair|forget`."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from outbox.contrib.django.management.acting import ActionCommand
from outbox.contrib.django.management.output import positive
from outbox.contrib.django.models import Finding


class Command(ActionCommand):
    """Parses the arguments, then calls the function of the chosen subcommand."""

    help = "List the findings that `outbox_reconcile --save` has saved, do the repair of one, or forget a saved result."

    def add_arguments(self, parser: CommandParser) -> None:
        listing = self.add_subcommands(parser).add_parser("list", help="list the saved findings")
        listing.add_argument("--output", default="", help="only the findings of this output folder")
        listing.add_argument("--limit", type=positive, default=100, help="at most this many (default: 100)")
        self.add_json(listing)

    def _list(self, options: dict[str, Any]) -> None:
        found = Finding.objects.order_by("id")
        found = found.filter(output=options["output"]) if options["output"] else found
        rows = list(found[: options["limit"]])
        if options["json"]:
            self.print_json([_as_json(one) for one in rows])
            return
        self.print_rows(
            ["finding", "class", "rule", "key", "group", "step", "detail"],
            (
                (one.pk, one.finding_class, one.rule, one.key, one.group or "-", action_of(one), one.detail)
                for one in rows
            ),
        )


def action_of(finding: Finding) -> str:
    """The action of the finding's step: publish, replay or ask; else report."""
    return "report" if finding.step is None else str(finding.step["action"])


def _as_json(one: Finding) -> dict[str, Any]:
    names = ("output", "run", "rule", "group", "severity", "key", "detail", "message_id", "transaction_id")
    named = {name: getattr(one, name) for name in names}
    return {"finding": one.pk, "class": one.finding_class, **named, "step": action_of(one)}
