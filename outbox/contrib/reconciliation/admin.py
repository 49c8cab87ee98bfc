"""A read-only admin page of the reconciliation's findings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.contrib import admin
from django.http import HttpRequest
from django.urls import NoReverseMatch, reverse
from django.utils.html import format_html

from outbox.contrib.reconciliation.models import Finding

if TYPE_CHECKING:
    _Findings = admin.ModelAdmin[Finding]
else:
    _Findings = admin.ModelAdmin


@admin.register(Finding)
class FindingAdmin(_Findings):
    """The admin page of the last reconciliation's findings.

    When the data of a finding has been corrected, the next run removes the finding.
    """

    list_display = ("finding_class", "rule", "group", "key", "detail", "at")
    list_filter = ("finding_class", "severity", "rule", "group", "output")
    search_fields = ("key", "message_id", "transaction_id")
    ordering = ("rule", "finding_class", "group", "key")
    readonly_fields = ("trace", "operations_page")

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Always False."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: object = None) -> bool:
        """Always False: a reconciliation replaces the findings."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: object = None) -> bool:
        """Always False."""
        return False

    @admin.display(description="trace by")
    def trace(self, finding: Finding) -> str:
        """The command that shows the message's history."""
        return f"python manage.py outbox_message show {finding.message_id}" if finding.message_id else ""

    @admin.display(description="operations page")
    def operations_page(self, finding: Finding) -> str:
        """A link to the message on the operations page, if the project has mounted the page."""
        try:
            address = reverse("outbox:message", args=[finding.message_id])
        except NoReverseMatch:
            return ""
        return format_html('<a href="{}">{}</a>', address, finding.message_id)
