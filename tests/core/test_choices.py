"""Options that are members of enumerations refuse anything else at once, and say which member was meant."""

from __future__ import annotations

from typing import Any

import pytest

from outbox.errors import ConfigurationError, InvalidSubscription
from outbox.subscription import Effects, Mode, OnError, Start, Subscription
from outbox.topic import MessageType, Topic

# Options of a subscription, and the end of the error.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"mode": "key_ordered"}, "mode='key_ordered' must be Mode.KEY_ORDERED."),
    ({"mode": "Key-Ordered"}, "mode='Key-Ordered' must be Mode.KEY_ORDERED."),
    ({"mode": "fifo"}, "mode='fifo' must be Mode.CONCURRENT or Mode.ORDERLY or Mode.KEY_ORDERED."),
    ({"mode": None}, "mode=None must be Mode.CONCURRENT or Mode.ORDERLY or Mode.KEY_ORDERED."),
    ({"start": "latest"}, "start='latest' must be Start.LATEST."),
    ({"start": 7}, "start=7 must be Start.EARLIEST or Start.LATEST or a datetime with a time zone."),
    ({"effects": "outside"}, "effects='outside' must be Effects.OUTSIDE."),
    ({"on_error": {ValueError: "stop"}}, "on_error[ValueError]='stop' must be OnError.STOP."),
]


def test_a_subscription_takes_members_only() -> None:
    for options, end in WRONG:
        with pytest.raises(InvalidSubscription) as caught:
            Subscription(topic="t", group="g", **options)
        assert str(caught.value) == f"subscription 'g' to 't': {end}"
    Subscription(
        topic="t",
        group="g",
        mode=Mode.KEY_ORDERED,
        start=Start.LATEST,
        effects=Effects.INSIDE,
        on_error={ValueError: OnError.STOP},
    )


def test_a_topic_takes_members_only() -> None:
    # "FIFO" would contain each of its letters.
    for wrong, end in (
        ({"FIFO"}, "types has 'FIFO', which must be MessageType.FIFO."),
        ({"fifo", MessageType.DELAY}, "types has 'fifo', which must be MessageType.FIFO."),
        ("FIFO", "types='FIFO' must be a set, such as frozenset({MessageType.FIFO})."),
    ):
        given: Any = wrong
        with pytest.raises(ConfigurationError) as caught:
            Topic(name="t", types=given)
        assert str(caught.value) == f"topic 't': {end}"
