"""Read-only admin pages of the ledger and the audit of operator actions.

The inbox has no admin page, because the admin cannot show tables with composite keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.contrib import admin
from django.http import HttpRequest
from django.urls import NoReverseMatch, reverse
from django.utils.html import format_html

from outbox.contrib.django.models import LedgerEntry, LedgerIdentity, OperatorAction

if TYPE_CHECKING:
    _Entries = admin.ModelAdmin[LedgerEntry]
    _Identities = admin.ModelAdmin[LedgerIdentity]
    _Actions = admin.ModelAdmin[OperatorAction]
else:
    _Entries = _Identities = _Actions = admin.ModelAdmin


class ReadOnly:
    """Makes an admin page read-only: a manual change of the ledger can lose messages or publish wrong messages."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Always False."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: object = None) -> bool:
        """Always False."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: object = None) -> bool:
        """Always False."""
        return False


@admin.register(LedgerEntry)
class LedgerEntryAdmin(ReadOnly, _Entries):
    """The admin page of local transactions that published messages, and of tombstones.

    A tombstone belongs to a local transaction that did not commit.
    """

    list_display = ("transaction_id", "state", "created_at")
    list_filter = ("state",)
    search_fields = ("transaction_id",)
    ordering = ("-transaction_id",)
    show_full_result_count = False


@admin.register(LedgerIdentity)
class LedgerIdentityAdmin(ReadOnly, _Identities):
    """The admin page with the id of this database's ledger."""

    list_display = ("ledger_id", "pruned_before")


@admin.register(OperatorAction)
class OperatorActionAdmin(ReadOnly, _Actions):
    """The admin page of operator actions, run by a command or on the operations page."""

    list_display = ("at", "who", "action", "subject", "why", "outcome")
    list_filter = ("action", "outcome")
    ordering = ("-id",)
    show_full_result_count = False
    readonly_fields = ("operations_page",)

    @admin.display(description="operations page")
    def operations_page(self, entry: OperatorAction) -> str:
        """A link to this audit entry on the operations page."""
        return link("audit_entry", entry.pk, str(entry))


def link(name: str, argument: object, text: str) -> str:
    """A link to the operations page; '' if the page has no address for `argument` or is not mounted."""
    try:
        address = reverse(f"outbox:{name}", args=[argument])
    except NoReverseMatch:
        return ""
    return format_html('<a href="{}">{}</a>', address, text)
