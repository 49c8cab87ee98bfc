"""The points' functions for the storefront."""

from __future__ import annotations

from django.db.models import Sum

from sample_project.points.models import Entry


def balance(customer: str) -> int:
    """All points of a customer."""
    total: int = Entry.objects.filter(customer=customer).aggregate(total=Sum("points", default=0))["total"]
    return total
