"""`check --database` and the doctor add up the sessions that the workers may open."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.db import connections

from outbox.broker.operations.conditions import Severity
from outbox.contrib.django import subscriber
from outbox.contrib.django.ledger.ledger_checker import ledger_aliases
from outbox.contrib.django.operations.checks import check_databases
from outbox.contrib.django.operations.doctor import examine
from outbox.contrib.django.operations.sessions import demands
from outbox.contrib.django.settings.conf import get_settings


@pytest.mark.usefixtures("databases", "no_subscribers")
def test_the_sum_is_compared_with_the_limit(outbox_settings: Callable[..., None]) -> None:
    for number in range(14):
        subscriber("orders", group=f"group{number}")(lambda given: None)
    [demand] = [one for one in demands(get_settings()) if "broker" in one.aliases]
    # Eight handlers, 2 sessions of the consumer process, 9 to publish, 4 of the worker, and one pass for each ledger.
    assert demand.of_worker == 8 + 2 + 9 + 4 + len(set(ledger_aliases()) & set(demand.aliases))
    [(allowed,)] = [[int(row[0])] for row in _rows("SHOW max_connections")]
    assert (demand.workers, demand.limit.allowed) == (1, allowed)
    assert 0 < demand.open_elsewhere < allowed

    def warnings(alias: str) -> list[str]:
        return [str(one.msg) for one in check_databases(databases=[alias]) if one.id == "outbox.W042"]

    assert warnings("default") == []
    outbox_settings(HANDLER_THREADS=4)
    [fewer] = [one for one in demands(get_settings()) if "broker" in one.aliases]
    # As many handlers less, and as many of their sessions to publish.
    assert fewer.of_worker == demand.of_worker - 4 - 4
    outbox_settings(HANDLER_THREADS=8, CONSUMER_PROCESSES=allowed // 8)
    [text] = warnings("default")
    assert "1 worker(s) of this project may open" in text and f"allows {allowed}" in text
    assert len(warnings("broker")) == 1
    assert [one.severity for one in examine() if one.name == "check outbox.W042"] == [Severity.WARNING]
    outbox_settings(CONSUMER_PROCESSES=1)
    [fine] = [one for one in examine() if one.name == "sessions of workers"]
    assert f"1 worker(s) of this project may open {demand.of_worker} sessions each" in fine.meaning


def _rows(statement: str) -> list[tuple[str]]:
    with connections["default"].cursor() as cursor:
        cursor.execute(statement)
        found: list[tuple[str]] = cursor.fetchall()
        return found
