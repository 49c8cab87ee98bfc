"""Fair share beside limits: the next slot or token goes to the tenant whose turn it is."""

from __future__ import annotations

import pytest

from outbox.contrib.limits import Limits
from outbox.errors import InvalidSubscription
from outbox.subscription import Subscription
from tests.broker.bench import ConsumptionBench
from tests.broker.fair_share.support import HEADER, Handled, of
from tests.support import eventually


@pytest.mark.parametrize("limits", [Limits(rate="50/s"), Limits(running=1)], ids=str)
def test_tenants_share_a_limit(bench: ConsumptionBench, limits: Limits) -> None:
    bench.declare("orders", queues=1)
    bench.publish([*of("a", 1_500), *of("b", 2)])
    handled = Handled()
    subscription = Subscription(group="g", topic="orders", threads=2, options=[limits, HEADER])
    with bench.running((subscription, handled)):
        eventually(lambda: len(handled.places("b")) == 2)
    assert max(handled.places("b")) < 1_000
    bench.assert_conserved("g")


def test_two_orders_of_messages_are_refused() -> None:
    with pytest.raises(InvalidSubscription, match="only one option may decide which message is next"):
        Subscription(group="g", topic="orders", options=[HEADER, Limits(per_key=1)])
