"""A process's reports about its handlers: log lines with the message, spans, and figures."""

from __future__ import annotations

import time
from collections.abc import Sequence

from outbox import log_context, measures, tracing
from outbox.message import Delivery
from outbox.ports import AnyHandler, Disposition, Invoker
from outbox.subscription import Subscription


def observed(invoker: Invoker) -> Invoker:
    """`invoker`, with every call reported as on the bundled broker."""

    def invoke(
        subscription: Subscription, handler: AnyHandler, deliveries: Sequence[Delivery], *, generation: int
    ) -> Sequence[Disposition | Exception]:
        started = time.time()
        with log_context.handling(deliveries):
            if tracing.tracer is None:
                results = invoker(subscription, handler, deliveries, generation=generation)
            else:
                with tracing.tracer.handling(deliveries) as conclude:
                    results = invoker(subscription, handler, deliveries, generation=generation)
                    conclude(results)
        if measures.recorder is not None:
            failed = sum(isinstance(result, BaseException) for result in results)
            waited = [started - _ready_at(delivery) for delivery in deliveries if delivery.attempt == 1]
            took = time.time() - started
            measures.recorder.handled(subscription.group, subscription.topic, waited, took, failed=failed)
        return results

    return invoke


def _ready_at(delivery: Delivery) -> float:
    return (delivery.message.deliver_at or delivery.message.born_at).timestamp()
