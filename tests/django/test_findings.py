"""The table of reconciliation's findings holds one result per output, whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.db import DatabaseError

from outbox.contrib.django.models import Finding
from outbox.contrib.django.operations.findings import replace

pytestmark = pytest.mark.usefixtures("application")


@pytest.fixture(autouse=True)
def _no_findings(application: None) -> Any:
    yield
    Finding.objects.all().delete()


def line(key: str, **changed: object) -> str:
    texts = ("detail", "message_id", "transaction_id", "row", "body", "at", "first_seen")
    found = {"run": "r1", "rule": "orders", "group": "", "class": "LOST", "severity": "critical", "key": key}
    return json.dumps({**found, **dict.fromkeys(texts), **changed})


def keys(output: str) -> list[str]:
    return list(Finding.objects.filter(output=output).order_by("key").values_list("key", flat=True))


def test_a_result_replaces_the_previous_one_of_its_output() -> None:
    replace("orders", [line("1"), line("2", at="2025-06-01T00:00:00+00:00")])
    replace("refunds", [line("9")])
    assert replace("orders", [line("2"), line("3")]) == 2
    assert keys("orders") == ["2", "3"]
    assert keys("refunds") == ["9"]
    replace("orders", [])
    assert keys("orders") == []


def test_a_result_that_cannot_be_saved_leaves_the_previous_one() -> None:
    replace("orders", [line("1")])
    with pytest.raises(DatabaseError):
        replace("orders", [line("2"), line("3", **{"class": "x" * 99})])
    assert keys("orders") == ["1"]


def test_values_are_made_to_fit() -> None:
    replace("orders", [line("a\0b", severity="s" * 99, body="x" * 5_000)])
    found = Finding.objects.get()
    assert (found.key, len(found.severity), len(found.body)) == ("a\N{REPLACEMENT CHARACTER}b", 15, 5_000)
