"""The cost of tracing in a process: one publish call, and one call of a handler with 1 and with 500
messages. Off; with the API alone (no SDK set up); and with the SDK, spans ended into a processor that drops them."""

from __future__ import annotations

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import NoOpTracerProvider

from benchmarks.harness import table
from benchmarks.metrics import timed
from outbox import tracing
from outbox.contrib.opentelemetry.tracer import OpenTelemetryTracer
from outbox.message import Delivery, Message

BATCH = 500


def main() -> None:
    """One row for each way to run."""
    rows = [
        ["off", *measure(None)],
        ["on, without an SDK", *measure(OpenTelemetryTracer(NoOpTracerProvider()))],
        ["on, with the SDK", *measure(OpenTelemetryTracer(TracerProvider()))],
    ]
    columns = ["tracing", "publish", "handler, 1", f"handler, {BATCH}"]
    table("microseconds per call (median, low to high)", columns, rows)


def measure(tracer: tracing.Tracer | None) -> list[str]:
    """The columns of a row."""
    tracing.install(tracer)
    messages = [Message(topic="orders", body=b"{}", key="o1")]
    with tracing.publishing(messages) as traced:
        one = [_delivery(message) for message in traced]
    many = []
    for _ in range(BATCH):
        # Each from a publish call of its own: the most that a batch can cost.
        with tracing.publishing(messages) as traced:
            many.append(_delivery(traced[0]))

    def publish() -> None:
        with tracing.publishing(messages):
            pass

    def handle(deliveries: list[Delivery]) -> None:
        # As the broker's caller and the in-memory broker do.
        if tracing.tracer is not None:
            with tracing.tracer.handling(deliveries) as conclude:
                conclude([None] * len(deliveries))

    return [timed(publish), timed(lambda: handle(one)), timed(lambda: handle(many), calls=200)]


def _delivery(message: Message) -> Delivery:
    return Delivery(message=message, body={}, group="points", queue="orders/0", offset=1)


if __name__ == "__main__":
    main()
