"""`manage.py outbox_endpoint list|enable`."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.core.management.base import CommandParser

from outbox.contrib.django.management.acting import ActionCommand
from outbox.contrib.django.models import ForwardEndpoint
from outbox.contrib.django.operations.endpoints import list_endpoints


class Command(ActionCommand):
    """Parses the arguments, then calls the function of the chosen subcommand."""

    help = "List the endpoints of OUTBOX['FORWARD'] with their deliveries, and enable a disabled endpoint."

    def add_arguments(self, parser: CommandParser) -> None:
        self.add_json(self.add_subcommands(parser).add_parser("list", help="list the endpoints"))

    def _list(self, options: dict[str, Any]) -> None:
        found = list_endpoints()
        if options["json"]:
            self.print_json([_as_json(one) for one in found])
            return
        self.print_rows(
            ["endpoint", "state", "delivered", "failed", "last status", "last delivered", "last error"],
            (
                (
                    one.group,
                    "enabled" if one.disabled_at is None else f"disabled: {one.disabled_reason}",
                    one.delivered,
                    one.failed,
                    one.last_status or "-",
                    _minute(one.last_delivered_at),
                    f"{_minute(one.last_error_at)} {one.last_error}" if one.last_error else "-",
                )
                for one in found
            ),
        )


def _as_json(one: ForwardEndpoint) -> dict[str, Any]:
    return {
        "endpoint": one.group,
        "disabled_at": one.disabled_at and one.disabled_at.isoformat(),
        "disabled_reason": one.disabled_reason,
        "delivered": one.delivered,
        "failed": one.failed,
        "last_status": one.last_status,
        "last_delivered_at": one.last_delivered_at and one.last_delivered_at.isoformat(),
        "last_error": one.last_error,
        "last_error_at": one.last_error_at and one.last_error_at.isoformat(),
    }


def _minute(at: datetime | None) -> str:
    return "-" if at is None else at.isoformat(sep=" ", timespec="seconds")
