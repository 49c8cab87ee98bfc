"""Forwarding messages of many keys, and of one key, to each local sink, compared with one that only acknowledges.

RabbitMQ, Redis and Kafka are measured where their URL is given: FORWARD_AMQP, FORWARD_REDIS, FORWARD_KAFKA
(servers; the cluster has to make topics by itself). `python -m benchmarks.forward private` starts those of them that
are installed (Debian, Maven) for the run. FORWARD_MESSAGES and OUTBOX_BENCH_REPEATS make it shorter.
One key at a time is what order costs: each message waits for the acknowledgement of the one before it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import psycopg

from benchmarks.harness import REPEATS, Spread, server, table
from outbox.broker import embedded
from outbox.broker.consumer.runtime import ConsumerRuntime
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.postgres import PostgresBroker
from outbox.broker.schema.install import install
from outbox.broker.sequencer.sequencer import Sequencer
from outbox.contrib.forwarding.sinks.formats import format_named
from outbox.contrib.forwarding.sinks.forwarder import Forwarder, RawCodecs, subscription
from outbox.contrib.forwarding.sinks.sink import Outgoing, Sink
from outbox.message import Message
from outbox.topic import MessageType, Topic

MESSAGES: Final = int(os.environ.get("FORWARD_MESSAGES", "5000"))
KEYS: Final = 1_000
BODY: Final = b'{"order": "' + b"x" * 240 + b'"}'
SECRET: Final = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


class Acknowledging:
    """The ceiling: the rate of the consumer group itself."""

    binding = "http"
    batch = 500
    threads = 4

    def send(self, messages: Sequence[Outgoing]) -> Sequence[Exception | None]:
        """Nothing is sent."""
        return [None] * len(messages)

    def close(self) -> None:
        """Nothing to close."""


def sinks(port: int) -> Iterator[tuple[str, Callable[[], Sink]]]:
    """Those that are here, by name."""
    from outbox.contrib.forwarding.sinks.webhook import WebhookSink

    yield "acknowledges only", Acknowledging
    url = f"http://127.0.0.1:{port}/"
    yield "webhook", lambda: WebhookSink(url=url, secrets=[SECRET], allow_private=True, allow_http=True)
    for variable in ("FORWARD_REDIS", "FORWARD_AMQP"):
        if found := os.environ.get(variable):
            yield found.partition(":")[0].partition("+")[0], _kombu(found)
    if servers := os.environ.get("FORWARD_KAFKA"):
        from outbox.contrib.forwarding.sinks.kafka import KafkaSink

        yield "kafka", lambda: KafkaSink(servers=servers)


def _kombu(url: str) -> Callable[[], Sink]:
    from outbox.contrib.forwarding.sinks.kombu import KombuSink

    return lambda: KombuSink(url=url)


def forward(url: str, sink: Sink, *, keys: int, count: int, topic: str) -> float:
    """Messages per second, from a queue that is full to a group without lag."""
    with psycopg.connect(url, autocommit=True) as connection:
        install(connection)
    database = BrokerDatabase(conninfo=url)
    with contextlib.closing(PostgresBroker(database)) as broker:
        broker.declare([Topic(name=topic, types=frozenset({MessageType.NORMAL}), queue_count=8)])
        for start in range(0, count, 1_000):
            numbers = range(start, min(start + 1_000, count))
            broker.send([Message(topic=topic, key=f"k{n % keys}", body=BODY) for n in numbers], timeout_seconds=30)
    sequencer = Sequencer(database, uuid.uuid4())
    with contextlib.closing(database.connect()) as connection:
        while sequencer.run_once(connection).appended:
            pass
    form = format_named("plain", binding=sink.binding)
    runtime = ConsumerRuntime(
        database, [(subscription("forward", topic, sink), Forwarder(sink, topic, form))], codecs=RawCodecs()
    )
    started = time.perf_counter()
    counts = runtime.run_once()
    took = time.perf_counter() - started
    if counts.handled != count:
        raise SystemExit(f"{counts.handled} of {count} messages were forwarded")
    return count / took


@contextlib.contextmanager
def receiver() -> Iterator[int]:
    """A webhook receiver in a process of its own."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.forward", "receiver"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _receive() -> None:
    listening = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    print(listening.server_address[1], flush=True)
    threading.Thread(target=listening.serve_forever).start()


def main() -> None:
    """One row per sink."""
    rates: dict[tuple[str, int], list[float]] = {}
    with server() as url, receiver() as port:
        for run in range(REPEATS):
            for number, (name, make) in enumerate(sinks(port)):
                for keys, count in ((KEYS, MESSAGES), (1, MESSAGES // 10)):
                    database = embedded.create_database(url, f"forward_{run}_{number}_{keys}")
                    with contextlib.closing(make()) as sink:
                        topic = f"forward-{uuid.uuid4().hex}"
                        rate = forward(database, sink, keys=keys, count=count, topic=topic)
                    rates.setdefault((name, keys), []).append(rate)
    names = dict.fromkeys(name for name, _ in rates)
    table(
        "forwarding, messages/s, one process (median, low to high)",
        ["sink", f"{KEYS:,} keys", "one key"],
        [[name, f"{Spread.of(rates[name, KEYS])}", f"{Spread.of(rates[name, 1])}"] for name in names],
    )


@contextlib.contextmanager
def private_servers() -> Iterator[None]:
    """RabbitMQ, Redis and Kafka of the run's own, as the tests have them; without those that are not installed."""
    # pytest's own "skipped" reports that one is not.
    from _pytest.outcomes import Skipped

    from tests.kafka_server import Kafka
    from tests.servers import RabbitMQ, private_redis

    with contextlib.ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))) for _ in range(3)]
        with contextlib.suppress(Skipped):
            path = stack.enter_context(private_redis(folders[0], "--appendonly", "yes", "--appendfsync", "always"))
            os.environ["FORWARD_REDIS"] = f"redis+socket://{path}"
        with contextlib.suppress(Skipped):
            rabbitmq = RabbitMQ(folders[1])
            rabbitmq.start()
            stack.callback(rabbitmq.stop)
            os.environ["FORWARD_AMQP"] = rabbitmq.url
        with contextlib.suppress(Skipped):
            kafka = Kafka(folders[2], makes_topics=True)
            kafka.start()
            stack.callback(kafka.stop)
            os.environ["FORWARD_KAFKA"] = kafka.servers
        yield


if __name__ == "__main__":
    if sys.argv[1:] == ["receiver"]:
        _receive()
    elif sys.argv[1:] == ["private"]:
        with private_servers():
            main()
    else:
        main()
