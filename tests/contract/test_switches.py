"""Topics that take transactional messages only, over every broker and path."""

from __future__ import annotations

import pytest

from outbox.errors import MessageTypeMismatch
from tests.contract.benches import Bench
from tests.contract.test_transactional import ids, message


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
