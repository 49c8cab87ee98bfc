"""The picture of a message's page: the transaction, and what the handlers of its messages published in turn."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import pytest
from django.apps import AppConfig
from django.db import transaction
from django.test import Client

from outbox import Delivery, hooks
from outbox.broker.operations.trace import trace
from outbox.contrib.console.followers.cause import HEADER
from outbox.contrib.console.views import followers
from outbox.contrib.console.views.followers import LEVELS, MOST, SEARCHED, Node, Picture, picture
from outbox.contrib.django import publish, publish_many, subscriber
from outbox.contrib.django.engine import broker as broker_access
from outbox.contrib.django.worker.workers import consumer_runtime
from outbox.errors import PermanentError
from outbox.names import MAX_HEADERS
from tests.django.broker_world import World
from tests.django.console.test_remedies import page, text_of
from tests.django.operators import client_of, make_user
from tests.django.support import sequence

pytestmark = pytest.mark.usefixtures("no_subscribers", "one_session")


@pytest.fixture
def recording(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The app of the causes is installed."""
    monkeypatch.setattr(hooks, "body_steps", dict(hooks.body_steps))
    AppConfig.create("outbox.contrib.console.followers").ready()
    broker_access.reset_broker()


def of(world: World, message_id: UUID) -> Picture:
    """The picture of a message."""
    with world.broker.transaction():
        found = trace(world.run, message_id)
        assert found is not None
        return picture(world.run, found, next(one for one in found.messages if one.message_id == str(message_id)))


def drawn(nodes: Any) -> list[Any]:
    def one(node: Node) -> Any:
        return node.topic, node.by_group, [text for text, _ in node.states], drawn(node.followers)

    return [one(node) for node in nodes]


def caused(world: World, cause: object, key: str = "", group: str = "mail") -> UUID:
    """A message that names its cause, as a handler's would."""
    return publish("orders", {}, key=key, headers={HEADER: f"{cause} {group}"}, at_once=True).message_id


def handle(rounds: int = 1) -> None:
    for _ in range(rounds):
        sequence()
        consumer_runtime().run_once()


def subscribed() -> None:
    """Two groups of the orders, of which one publishes payments; and one group that fails on them."""

    @subscriber("orders", group="billing")
    def billing(delivery: Delivery) -> None:
        with transaction.atomic():
            publish("payments", {}, key=delivery.key)

    @subscriber("orders", group="mail")
    def mail(delivery: Delivery) -> None:
        pass

    @subscriber("payments", group="books")
    def books(delivery: Delivery) -> None:
        raise PermanentError("no such account")


def test_followers_are_drawn_below_the_message_whose_handler_published_them(
    recording: None, world: World, operator: Client
) -> None:
    subscribed()
    first, second = publish_many("orders", [{}, {}], key="o1", at_once=True)
    handle(2)
    books: Any = ("payments", "billing", ["books: dead"], [])
    root = ("orders", None, ["billing: handled", "mail: handled"], [books])
    assert drawn(of(world, first.message_id).nodes) == [root, root]
    html = page(operator, f"messages/{first.message_id}/")
    assert html.count('aria-current="true"><div') == 1 and "published by billing" in text_of(html)
    [payment] = [UUID(one.followers[0].message_id) for one in of(world, second.message_id).nodes[1:]]
    assert of(world, payment).cause == second.message_id
    assert f"A handler of {second.message_id} published it" in text_of(page(operator, f"messages/{payment}/"))
    # Ids and groups only: the headers of a message are for those who may see bodies.
    reader = client_of(make_user("view_operations"))
    assert str(payment) in page(reader, f"messages/{second.message_id}/")


def test_without_the_app_a_message_has_no_header_more_and_the_page_says_how(world: World, operator: Client) -> None:
    subscribed()
    order = publish("orders", {}, key="o1", at_once=True).message_id
    handle()
    assert world.sql("SELECT headers FROM outbox.commit_log WHERE message_id <> %s", order) == [(None,)]
    assert "add outbox.contrib.console.followers to INSTALLED_APPS" in text_of(page(operator, f"messages/{order}/"))


def test_a_batch_a_header_of_the_project_and_full_headers_stay_as_they_are(recording: None, world: World) -> None:
    full = {f"h{number}": "" for number in range(MAX_HEADERS)}

    @subscriber("orders", group="batched", batch=10)
    def batched(deliveries: list[Delivery]) -> None:
        publish("payments", {}, key="batch")

    @subscriber("orders", group="single")
    def single(delivery: Delivery) -> None:
        publish("payments", {}, key="own", headers={HEADER: "mine"})
        publish("payments", {}, key="full", headers=full)
        publish("payments", {}, key="one", timeout=30)

    publish_many("orders", [{}, {}], at_once=True)
    handle()
    found: dict[str, Any] = dict(world.sql("SELECT key, headers FROM outbox.commit_log"))
    assert found["batch"] is None and found["own"] == {HEADER: "mine"} and found["full"] == full
    assert found["one"][HEADER].endswith(" single") and found["one"]["outbox-timeout"] == "30"


def test_the_picture_is_bounded(world: World, operator: Client) -> None:
    world.subscribe("mail")
    [first, *_] = publish_many("orders", [{}] * (MOST + 7), key="o1", at_once=True)
    for _ in range(MOST + 3):
        caused(world, first.message_id)
    found = of(world, first.message_id)
    assert (len(found.nodes), len(found.nodes[0].followers), found.more) == (MOST, MOST, 7 + 3)
    assert "And 10 more." in text_of(page(operator, f"messages/{first.message_id}/"))
    chain = [publish("orders", {}, at_once=True).message_id]
    for _ in range(LEVELS + 2):
        chain.append(caused(world, chain[-1]))
    node, depth = of(world, chain[0]).nodes[0], 0
    while node.followers:
        [node], depth = node.followers, depth + 1
    assert depth == LEVELS and of(world, chain[1]).cause == chain[0]


def test_a_header_of_any_shape_is_no_cause(world: World, operator: Client) -> None:
    order = publish("orders", {}, key="o1", at_once=True).message_id
    bad = "<script>alert(1)</script>\N{RIGHT-TO-LEFT OVERRIDE}"
    shapes: list[object] = ["x", [HEADER], 5, None, {HEADER: 5}, {HEADER: None}, {HEADER: [str(order)]}]
    shapes += [{HEADER: ""}, {HEADER: bad}, {HEADER: f"{order}"[:-1]}, {HEADER: "9" * 5000}]
    for shape in shapes:
        message_id = publish("orders", {}, at_once=True).message_id
        world.sql("UPDATE outbox.commit_log SET headers = %s WHERE message_id = %s", json.dumps(shape), message_id)
        assert of(world, message_id).cause is None, shape
        page(operator, f"messages/{message_id}/")
    assert drawn(of(world, order).nodes) == [("orders", None, [], [])]
    # A group that is none is not shown, and messages that name each other or themselves make no circle.
    one, two = caused(world, order, bad, group=bad), caused(world, order)
    for message_id, cause in ((one, two), (two, one), (order, order)):
        world.sql(
            "UPDATE outbox.commit_log SET headers = %s WHERE message_id = %s",
            json.dumps({HEADER: f"{cause} {bad}"}), message_id,
        )  # fmt: skip
    for message_id in (order, one, two):
        html = page(operator, f"messages/{message_id}/")
        assert "<script>alert" not in html and "\N{RIGHT-TO-LEFT OVERRIDE}" not in html
    assert drawn(of(world, one).nodes) == [("orders", None, [], [("orders", None, ["committed"], [])])]


@pytest.mark.slow
def test_a_bounded_part_of_the_log_is_read_by_its_primary_key(world: World) -> None:
    order = publish("orders", {}, at_once=True).message_id
    follower = caused(world, order)
    world.sql(
        "INSERT INTO outbox.commit_log (born_at, transaction_id, message_id, topic_id, half, key, tag, content_type,"
        " body) SELECT now(), gen_random_uuid(), gen_random_uuid(), topic_id, false, '', '', '', '' FROM"
        " outbox.commit_log, generate_series(1, %s)",
        SEARCHED,
    )
    late = caused(world, order)
    world.sql("ANALYZE outbox.commit_log")
    assert [one.message_id for one in of(world, order).nodes[0].followers] == [str(follower)] and late
    given = {"first": 1, "last": 1 + SEARCHED, "ids": [str(order)], "levels": LEVELS, "most": MOST}
    plan = "\n".join(
        line
        for (line,) in world.broker.execute(
            f"EXPLAIN {followers._FOLLOWERS.text.format(schema='outbox')}".encode(), given
        )
    )
    assert "Index Scan using commit_log_pkey" in plan and "Seq Scan on commit_log" not in plan, plan
