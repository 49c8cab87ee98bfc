"""A number that PostgreSQL or a wait cannot hold is refused where it is declared, with its name and the bound."""

from __future__ import annotations

from typing import Any, Final

import pytest

from outbox.errors import ConfigurationError, InvalidSubscription
from outbox.retry import RetryPolicy
from outbox.subscription import Subscription
from outbox.topic import Topic

INTEGER: Final = 2**31
BIGINT: Final = 2**63
DAY: Final = 86_400
NAN: Final = float("nan")
# The name of an option, the largest value, values above it and the bound in the error.
SUBSCRIPTION: Final[list[tuple[str, Any, list[Any], str]]] = [
    ("batch", 10_000, [10_001, INTEGER], "from 1 to 10,000"),
    ("threads", 10_000, [10_001, INTEGER], "from 1 to 10,000"),
    ("timeout_seconds", 24 * DAY, [24 * DAY + 1, 1e300, 10**400, float("inf"), NAN], "at most 2,073,600"),
    ("suspend_seconds", 24 * DAY, [24 * DAY + 1, 1e300, 10**400, float("inf"), NAN], "at most 2,073,600"),
    ("max_suspends", INTEGER - 1, [INTEGER, 10**400], "from 0 to 2,147,483,647"),
]
RETRY: Final[list[tuple[str, Any, list[Any], str]]] = [
    ("delays_seconds", [366 * DAY], [[366 * DAY + 1], [1, 1e300], [NAN]], "from 0 to 31,622,400"),
    # The broker counts no more attempts, so a larger limit would never be reached.
    ("max_attempts", 30_000, [30_001, BIGINT], "from 1 to 30,000"),
]
TOPIC: Final[list[tuple[str, Any, list[Any], str]]] = [
    ("queue_count", 1024, [1025], "1 to 1024"),
    ("retention_seconds", INTEGER - 1, [INTEGER, BIGINT], "at most 2,147,483,647"),
    ("backlog_limit", BIGINT - 1, [BIGINT], r"below 2\*\*63"),
]


def test_options_of_subscriptions_retries_and_topics_have_bounds() -> None:
    for make, error, cases in (
        (lambda **given: Subscription(topic="t", group="g", **given), InvalidSubscription, SUBSCRIPTION),
        (RetryPolicy, ConfigurationError, RETRY),
        (lambda **given: Topic(name="t", **given), ConfigurationError, TOPIC),
    ):
        for name, largest, above, bound in cases:
            make(**{name: largest})
            for value in above:
                with pytest.raises(error, match=rf"(?s){name}.*{bound}"):
                    make(**{name: value})
