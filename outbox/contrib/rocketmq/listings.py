"""The lists of the commands and pages on RocketMQ, whose figures differ from those of the broker in PostgreSQL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from outbox.broker.operations.dead_letters import DeadLetter
from outbox.contrib.django.actions import messages, transactions
from outbox.contrib.django.actions.listing import Asked, Column
from outbox.contrib.rocketmq import operations
from outbox.errors import UsageError

_HERE: Final[Any] = {"engine": "rocketmq", "of_broker": False}


def _letters(run: None, asked: Asked) -> list[DeadLetter]:
    page = asked.only("settled", "after")
    return operations.list_letters(asked["group"], messages.selected(asked), **page, limit=asked.limit)


# RocketMQ's consumers note the error of the last attempt only.
LETTERS: Final = replace(
    messages.LETTERS, read=_letters, json=lambda one: {"letter": one, "failures": []}, tab="", **_HERE
)


def _open(run: None, asked: Asked) -> list[dict[str, Any]]:
    if asked["transactional_id"] or asked["parked"] or asked["after"]:
        raise UsageError(
            "RocketMQ has no transactional ids and no parked transactions, and the list has one page: leave these "
            "options out."
        )
    return operations.open_transactions(asked["group"])[: asked.limit]


OPEN: Final = replace(
    transactions.OPEN,
    columns=[
        Column(name.replace("_", " "), name)
        for name in (
            *("transaction_id", "producer_group", "message_id", "topic", "key"),
            *("sent_at", "checks", "state", "broker", "ledger"),
        )
    ],
    read=_open,
    position=None,
    json=None,
    **_HERE,
)
