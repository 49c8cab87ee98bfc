"""Producers with a transactional id: the newest instance fences the older ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outbox.errors import ProducerFenced
from outbox.transaction import Decision, EndStatus
from tests.contract.benches import GROUP, Bench
from tests.contract.test_transactional import AnswerWith, check_back, end, half, ids, message


class TestFencing:
    """Producers with a transactional id: the newest instance fences the older ones."""

    def test_an_older_producer_is_fenced_at_send(self, bench: Bench) -> None:
        older = bench.broker.take_over(GROUP, "import")
        newer = bench.broker.take_over(GROUP, "import")
        assert (older.epoch, newer.epoch) == (1, 2)
        with pytest.raises(ProducerFenced, match=r"import.*epoch 1"):
            bench.broker.send([message(1)], producer=older)
        with pytest.raises(ProducerFenced, match=r"import.*epoch 1"):
            bench.broker.send_half(replace(half(message(2)), producer=older))
        sent = message(3)
        bench.broker.send([sent], producer=newer)
        assert ids(bench.visible("orders")) == {sent.message_id}

    def test_ids_and_groups_do_not_fence_each_other(self, bench: Bench) -> None:
        instances = [
            bench.broker.take_over(group, name) for group, name in ((GROUP, "a"), (GROUP, "b"), ("other", "a"))
        ]
        for number, producer in enumerate(instances):
            bench.broker.send([message(number)], producer=producer)
        assert len(bench.visible("orders")) == 3

    def test_what_an_older_producer_left_undecided_is_known_and_due_at_once(self, bench: Bench) -> None:
        older = bench.broker.take_over(GROUP, "import")
        left = replace(half(message(1)), producer=older, immunity_seconds=3600)
        decided = replace(half(message(2)), producer=older)
        bench.broker.send_half(left)
        bench.broker.send_half(decided)
        bench.broker.end([end(decided, Decision.COMMIT)])
        newer = bench.broker.take_over(GROUP, "import")
        assert bench.broker.leftovers(newer) == [left.transaction_id]
        checker = AnswerWith(lambda check: Decision.ROLLBACK)
        check_back(bench, checker)
        assert [(check.transaction_id, check.may_write) for check in checker.asked] == [(left.transaction_id, True)]
        assert bench.broker.leftovers(newer) == []
        # The half of the instance itself is not left over.
        bench.broker.send_half(replace(half(message(3)), producer=newer))
        assert bench.broker.leftovers(newer) == []

    def test_an_older_producers_half_is_decided_by_its_end_all_the_same(self, bench: Bench) -> None:
        """Its local transaction had begun before: the local outcome is final."""
        older = bench.broker.take_over(GROUP, "import")
        sent = replace(half(message(1)), producer=older)
        bench.broker.send_half(sent)
        bench.broker.take_over(GROUP, "import")
        assert bench.broker.end([end(sent, Decision.COMMIT)]) == [EndStatus.APPLIED]
        assert ids(bench.visible("orders")) == {sent.transaction_id}
