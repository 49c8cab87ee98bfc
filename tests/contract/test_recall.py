"""Recall, over every broker and path: by id and by key, before the delivery time and between retries, once."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from outbox import RetryPolicy
from outbox.errors import UnknownTopic
from outbox.message import Delivery, Message
from outbox.recall import Recall
from outbox.subscription import Subscription
from outbox.transaction import Decision
from outbox.utils.ids import uuid7
from tests.contract.benches import Bench
from tests.contract.test_transactional import end, half, ids, message

HOUR = 3600


def later(key: str = "") -> Message:
    deliver_at = datetime.now(UTC) + timedelta(hours=1)
    return Message(topic="later", body=b"{}", key=key, deliver_at=deliver_at)


def statuses(outcomes: Sequence[Recall]) -> list[str]:
    return [str(one.status) for one in outcomes]


def recall(bench: Bench, *messages: Message | UUID) -> list[str]:
    return statuses(bench.broker.recall([one.message_id if isinstance(one, Message) else one for one in messages]))


def test_a_message_is_recalled_before_its_time_and_no_group_gets_it(any_path: Bench) -> None:
    kept, dropped = later(), later()
    any_path.publish([kept], commit=True)
    any_path.publish([dropped], commit=True)
    assert any_path.visible("later") == []
    assert recall(any_path, dropped, uuid7()) == ["recalled", "unknown"]
    assert recall(any_path, dropped) == ["recalled before"]
    any_path.let_time_pass(HOUR + 1)
    assert ids(any_path.visible("later")) == ids([kept])
    assert recall(any_path, kept) == ["delivered"]
    assert any_path.totals_differ() == []


def test_all_messages_of_a_key_are_recalled_and_only_those(any_path: Bench) -> None:
    mine, others, now = [later("7"), later("7")], [later("70"), later()], message(topic="later", key="7")
    any_path.publish([*mine, *others, now], commit=True)
    assert ids(any_path.visible("later")) == ids([now])
    outcomes = any_path.broker.recall_key("later", "7")
    assert ({one.message_id for one in outcomes}, set(statuses(outcomes))) == (ids(mine), {"recalled"})
    assert any_path.broker.recall_key("later", "7") == []
    any_path.let_time_pass(HOUR + 1)
    assert ids(any_path.visible("later")) == ids([now, *others])
    with pytest.raises(UnknownTopic, match="latr"):
        any_path.broker.recall_key("latr", "7")


def test_what_is_undecided_or_rolled_back_cannot_be_recalled(bench: Bench) -> None:
    undecided, rolled_back = half(later()), half(later())
    bench.broker.send_half(undecided)
    bench.broker.send_half(rolled_back)
    bench.broker.end([end(rolled_back, Decision.ROLLBACK)])
    assert recall(bench, undecided.messages[0], rolled_back.messages[0]) == ["undecided", "rolled back"]
    bench.broker.end([end(undecided, Decision.COMMIT)])
    bench.let_time_pass(HOUR + 1)
    assert ids(bench.visible("later")) == ids(undecided.messages)


def test_a_retry_is_recalled_and_other_groups_have_had_the_message(any_path: Bench) -> None:
    policy = RetryPolicy(delays_seconds=[HOUR], max_attempts=3)
    seen: list[tuple[str, int]] = []

    def fails(delivery: Delivery) -> None:
        seen.append(("fails", delivery.attempt))
        raise ValueError("not now")

    any_path.subscribe(Subscription(topic="orders", group="fails", retry=policy), fails)
    any_path.subscribe(Subscription(topic="orders", group="works"), lambda delivery: seen.append(("works", 1)))
    one, other = message(1, key="7"), message(2)
    any_path.publish([one, other], commit=True)
    any_path.drain()
    assert sorted(seen) == [("fails", 1)] * 2 + [("works", 1)] * 2
    [outcome] = any_path.broker.recall_key("orders", "7")
    assert (outcome.message_id, outcome.status, outcome.groups) == (one.message_id, "recalled", ("fails",))
    assert recall(any_path, one) == ["recalled before"]
    any_path.let_time_pass(HOUR + 1)
    any_path.drain()
    assert sorted(seen)[2:] == [("fails", 2)] + [("works", 1)] * 2, "the other message is tried again, this one is not"
    assert any_path.dead_letters("fails") == []
    assert any_path.totals_differ() == []
