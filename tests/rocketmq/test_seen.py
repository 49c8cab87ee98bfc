"""What an operator sees of RocketMQ, on a real server."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.db import transaction

from outbox.contrib.django import publish, subscriber
from outbox.contrib.django.engine import broker as broker_access
from outbox.contrib.django.engine.broker import get_engine
from outbox.contrib.django.models import OperatorAction
from outbox.contrib.django.subscribers.registry import subscribers
from outbox.contrib.prometheus import serving
from outbox.contrib.rocketmq import operations
from outbox.contrib.rocketmq.models import DeadLetterNote
from outbox.message import Delivery
from outbox.retry import RetryPolicy
from outbox.rocketmq import inspection
from outbox.rocketmq.broker import RocketMQBroker
from outbox.topic import Topic
from tests.django.operators import ALL, client_of, make_user
from tests.rocketmq.conftest import running_server, unique
from tests.rocketmq_server import PrivateRocketMQ
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("application", "no_subscribers")

HOUR = 3_600_000


@pytest.fixture(scope="module")
def server(programs: Path) -> Iterator[PrivateRocketMQ]:
    """A server that asks about nothing for an hour, so that what is undecided stays so."""
    with running_server(programs, transactionTimeOut=HOUR, transactionCheckInterval=HOUR) as server:
        yield server


class Shop:
    """One topic and its group, whose handler fails while `broken` is true."""

    def __init__(self, server: PrivateRocketMQ) -> None:
        self.topic, self.group, self.broken = unique("orders."), unique("stock"), True
        self.handled: list[str] = []
        self._server = server
        self._declared = Topic(name=self.topic, queue_count=2)
        server.admin.create_topic(self._declared)

    def subscribe(self) -> None:
        """Register the handler, and create its group."""

        @subscriber(self.topic, group=self.group, retry=RetryPolicy(delays_seconds=[1], max_attempts=1))
        def handle(delivery: Delivery) -> None:
            if self.broken:
                raise RuntimeError(f"no shelf for {delivery.key}")
            self.handled.append(delivery.key)

        self._server.admin.create_group(subscribers()[0].subscription, self._declared)

    def publish(self, key: str) -> str:
        """Publish in a transaction that commits; the message's id."""
        with transaction.atomic():
            return str(publish(self.topic, {"number": key}, key=key).message_id)

    @contextlib.contextmanager
    def consuming(self) -> Iterator[None]:
        """Consumers of the project in a thread of this process."""
        stop = threading.Event()
        consumers = get_engine().consumers([(one.subscription, one.handler) for one in subscribers()])
        running = threading.Thread(target=consumers.run, args=[stop])
        running.start()
        try:
            yield
        finally:
            stop.set()
            running.join()


@pytest.fixture
def shop(server: PrivateRocketMQ, application: None, outbox_settings: Callable[..., None]) -> Iterator[Shop]:
    """A shop on the server, and its settings."""
    shop = Shop(server)
    outbox_settings(
        BROKER=server.url,
        PRODUCER_GROUP=unique("shop"),
        TOPICS={shop.topic: {"queue_count": 2}},
        IMMUNITY_SECONDS=0,
        SEND_TIMEOUT_SECONDS=20,
    )
    shop.subscribe()
    yield shop
    broker_access.reset_broker()
    for model in (DeadLetterNote, OperatorAction, User):
        model.objects.all().delete()


def said(*arguments: str) -> Any:
    """What a command prints with --json. `outbox_status` may exit with 1 or 2."""
    out = StringIO()
    with contextlib.suppress(SystemExit):
        call_command(*arguments, "--json", stdout=out, no_color=True)
    return json.loads(out.getvalue())


def group(shop: Shop) -> dict[str, Any]:
    [found] = said("outbox_status")["broker"]["groups"]
    assert (found["group"], found["topic"]) == (shop.group, shop.topic)
    return dict(found)


def dead(shop: Shop) -> list[str]:
    return sorted(one["key"] for one in letters(shop))


def letters(shop: Shop) -> list[dict[str, Any]]:
    return [item["letter"] for item in said("outbox_dead_letter", "list", shop.group)]


def test_dead_letters_are_listed_shown_replayed_and_discarded(shop: Shop) -> None:
    """With the handler's error. A replayed letter that fails again is one more; a settled one is not counted."""
    ids = {key: shop.publish(key) for key in ("a", "b", "c")}
    with shop.consuming():
        eventually(lambda: dead(shop) == ["a", "b", "c"], within_seconds=90, what=lambda: str(letters(shop)))
        listed = {one["key"]: one for one in letters(shop)}
        assert {key: one["message_id"] for key, one in listed.items()} == ids
        assert {(one["topic"], one["attempts"], one["error"]) for one in listed.values()} == {
            (shop.topic, 1, f"RuntimeError: no shelf for {key}") for key in ids
        }
        assert said("outbox_dead_letter", "list", shop.group, "--error", "FOR B")[0]["letter"]["key"] == "b"
        status = said("outbox_status")
        assert status["broker"]["dead_letters"] == {shop.group: 3}
        assert [(one["name"], one["severity"]) for one in status["conditions"]] == [("dead_letters", "warning")]
        # It fails again: the message has a second, newer dead letter, and the first is settled.
        said("outbox_dead_letter", "replay", shop.group, ids["a"], "--no-input")
        eventually(lambda: dead(shop) == ["a", "b", "c"], within_seconds=90, what=lambda: str(letters(shop)))
        assert len(said("outbox_dead_letter", "list", shop.group, "--settled")) == 4
        shop.broken = False
        said("outbox_dead_letter", "discard", shop.group, ids["c"], "--no-input")
        assert dead(shop) == ["a", "b"]
        assert said("outbox_dead_letter", "replay", shop.group, "--all", "--no-input")["before"]["selected"] == 2
        eventually(lambda: sorted(shop.handled) == ["a", "b"], within_seconds=60, what=lambda: str(shop.handled))
    assert dead(shop) == []
    with pytest.raises(CommandError, match="0 of the 1 ids are dead letters"):
        call_command("outbox_dead_letter", "replay", shop.group, ids["a"], "--no-input")
    assert said("outbox_status")["broker"]["dead_letters"] == {shop.group: 0}
    assert [one.outcome for one in OperatorAction.objects.order_by("id")] == ["done", "done", "done"]


def test_lag_and_metrics(shop: Shop) -> None:
    """Before a consumer runs: what waits, and since when."""
    for key in ("k1", "k2"):
        shop.publish(key)
    eventually(lambda: group(shop)["lag"] == 2, within_seconds=60)
    assert group(shop)["is_known"]
    text = serving.render().decode()
    for line in (
        f'outbox_lag_messages{{group="{shop.group}",topic="{shop.topic}"}} 2.0',
        f'outbox_queued_messages_total{{topic="{shop.topic}"}} 2.0',
        f'outbox_dead_letters{{group="{shop.group}"}} 0.0',
        'outbox_condition{name="unreachable"} 0.0',
    ):
        assert line in text
    # A condition that no rule judges here has no sample.
    assert "no_sequencer" not in text
    topics = said("outbox_status")["broker"]["topics"]
    assert topics == [{"topic": shop.topic, "queues": 2, "stored": 2, "written": 2}]
    assert "RocketMQ" in {one["name"] for one in said("outbox_doctor")}
    out = StringIO()
    call_command("outbox_status", stdout=out, no_color=True)
    assert shop.topic in out.getvalue()
    shop.broken = False
    with shop.consuming():
        eventually(lambda: sorted(shop.handled) == ["k1", "k2"], within_seconds=60)
    eventually(lambda: group(shop)["lag"] == 0, within_seconds=60)


def test_open_halves_with_what_the_ledger_says(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is committed and one rolled back, and RocketMQ knows neither; a decided one is not among them."""
    shop.publish("decided")
    broker_access.flush(within_seconds=10)
    monkeypatch.setattr(RocketMQBroker, "end_one_way", lambda self, end: None)
    shop.publish("committed")
    with contextlib.suppress(ZeroDivisionError), transaction.atomic():
        publish(shop.topic, {}, key="undone")
        raise ZeroDivisionError
    eventually(
        lambda: (
            [(one["key"], one["ledger"].partition(":")[0]) for one in said("outbox_transaction", "list")]
            == [("committed", "committed"), ("undone", "no row")]
        ),
        within_seconds=60,
        what=lambda: str(said("outbox_transaction", "list")),
    )
    assert said("outbox_status")["broker"]["undecided"] == 2


def test_pages(shop: Shop) -> None:
    """The overview has the figures; letters can be replayed from their page; another page says what to use."""
    message_id = shop.publish("p")
    client = client_of(make_user(*ALL))
    with shop.consuming():
        eventually(lambda: dead(shop) == ["p"], within_seconds=90)
    page = client.get("/outbox/").content.decode()
    assert all(text in page for text in (shop.topic, shop.group, "dead_letters", "No half message"))
    listed = client.get("/outbox/dead-letters/list/", {"group": shop.group}).content.decode()
    assert "no shelf for p" in listed and message_id in listed
    refused = client.get("/outbox/schedules/")
    assert refused.status_code == 404 and "Use Celery beat." in refused.content.decode()
    pausing = client.post("/outbox/act/pause/", {"group": shop.group})
    assert pausing.status_code == 404 and "outbox_group pause" in pausing.content.decode()
    assert client.get("/outbox/status/").json()["broker"]["dead_letters"] == {shop.group: 1}


def test_an_unreachable_broker_is_a_condition(shop: Shop, outbox_settings: Callable[..., None]) -> None:
    outbox_settings(BROKER="rocketmq://127.0.0.1:1?brokers=127.0.0.1:1")
    status = said("outbox_status")
    assert (status["severity"], status["complete"], status["broker"]) == ("critical", False, None)
    assert [one["name"] for one in status["conditions"]] == ["unreachable"]
    assert not operations.probe().is_healthy
    assert "outbox_lag_messages{" not in serving.render().decode()


def test_topics_and_groups_that_a_broker_lacks_are_named_and_created(
    server: PrivateRocketMQ, outbox_settings: Callable[..., None]
) -> None:
    """Without an address, --create uses the brokers of the settings."""
    topic, group, out = unique("orders."), unique("stock"), StringIO()
    outbox_settings(BROKER=server.url, PRODUCER_GROUP="shop", TOPICS={topic: {"queue_count": 2}})
    subscriber(topic, group=group)(lambda delivery: None)
    where = f"the broker 127.0.0.1:{server.admin.port} of RocketMQ has no"
    found = [text.partition(": ")[0] for text in inspection.missing([server.admin], [topic], [group])]
    assert found == [f"{where} topic {topic!r}", f"{where} group {group!r}"]
    try:
        call_command("outbox_install", "--create", stdout=out, no_color=True)
    finally:
        broker_access.reset_broker()
    assert list(inspection.missing([server.admin], [topic], [group])) == []
    assert out.getvalue().splitlines() == [
        "created or updated: 1 topics, 1 subscriptions",
        f"RocketMQ has the declared topics: {topic}",
    ]
