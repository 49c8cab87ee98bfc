"""Topics that take transactional messages only, and the switch that refuses those, over every broker and path."""

from __future__ import annotations

import pytest

from outbox.errors import MessageTypeMismatch, TransactionalMessagesRejected
from outbox.transaction import Decision
from tests.contract.benches import Bench
from tests.contract.test_transactional import end, half, ids, message


def test_a_topic_that_is_only_transactional_takes_nothing_outside_of_a_transaction(any_path: Bench) -> None:
    bound = message(topic="bound")
    with pytest.raises(MessageTypeMismatch, match=r"transaction\.atomic\(\).*add NORMAL"):
        any_path.broker.send([bound])
    with pytest.raises(MessageTypeMismatch, match="'bound' is declared TRANSACTION only"):
        any_path.broker.send([message(), bound])
    assert any_path.visible("orders") == [], "all or none"
    any_path.publish([bound], commit=True)
    any_path.publish([message(topic="bound")], commit=False)
    assert ids(any_path.visible("bound")) == ids([bound])


def test_a_repair_sends_what_has_committed_before_to_any_topic(any_path: Bench) -> None:
    bound, plain = message(topic="bound"), message(topic="plain")
    any_path.broker.send([bound, plain], committed=True)
    assert ids(any_path.visible("bound") + any_path.visible("plain")) == ids([bound, plain])


def test_refused_transactional_messages_are_refused_on_every_path(any_path: Bench) -> None:
    before, after = message(), message()
    any_path.publish([before], commit=True)
    assert any_path.broker.reject_transactional(True)
    assert not any_path.broker.reject_transactional(True), "it is so already"
    for refused in ([message()], [message(), message()]):
        with pytest.raises(TransactionalMessagesRejected):
            any_path.publish(refused, commit=True)
    plain = message()
    any_path.broker.send([plain])
    assert ids(any_path.visible("orders")) == ids([before, plain])
    assert any_path.broker.reject_transactional(False)
    any_path.publish([after], commit=True)
    assert ids(any_path.visible("orders")) == ids([before, plain, after])


def test_what_is_stored_already_is_decided_while_new_ones_are_refused(bench: Bench) -> None:
    one = half(message())
    bench.broker.send_half(one)
    bench.broker.reject_transactional(True)
    bench.broker.end([end(one, Decision.COMMIT)])
    assert ids(bench.visible("orders")) == ids(one.messages)
