"""UNDELIVERED needs a message that the subscription (filter, start) and the rule's own conditions accept."""

from __future__ import annotations

import json
from datetime import timedelta

import psycopg
import pytest

from outbox.filters.filter import parse_filter
from spark.stages.subscriptions import filter_sql
from tests.spark.conftest import Reconciler
from tests.spark.world import RULES, START, Order, World, group_rules

HEADERS = [
    {},
    {"region": "eu"},
    {"region": "it's"},
    {"amount": "10"},
    {"amount": "9.5", "region": "uk"},
    {"amount": "x"},
]
FILTERS = [
    "vip",
    "vip || gold",
    "sql: region = 'eu'",
    "sql: region = 'it''s' OR region IN ('uk', 'eu')",
    "sql: amount BETWEEN 9 AND 10.5 AND NOT (region LIKE 'e%' OR region IS NOT NULL)",
    "sql: amount NOT IN (9.5, 11)",
    "sql: amount > 9.5",
    "sql: TAGS = 'vip' AND amount IS NULL",
    "sql: \"region\" <> 'eu'",
    "sql: region != origin OR region NOT LIKE 'u!_%' ESCAPE '!'",
]


@pytest.mark.parametrize("text", FILTERS)
def test_a_filter_as_sql_lets_pass_what_the_broker_lets_pass(server_url: str, text: str) -> None:
    wanted = parse_filter(text)
    with psycopg.connect(server_url) as connection:
        for headers in HEADERS:
            for tag in ("", "vip", "gold"):
                shown = "SELECT %s::text AS tag, %s::text AS headers"
                statement = f"SELECT {filter_sql(text, 'g').replace('%', '%%')} FROM ({shown}) message"
                row = connection.execute(statement, [tag, json.dumps(headers)]).fetchone()
                assert row == (wanted.evaluate(tag, headers),), (tag, headers)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_group_owes_what_its_subscription_lets_pass(reconcile: Reconciler, world: World) -> None:
    """logistics starts at the third message, points filters by a tag, cart has owed_when; no group has any effect."""
    groups = group_rules().replace(
        'name = "cart"\n', "name = \"cart\"\nowed_when = \"headers::jsonb ->> 'kind' = 'cart'\"\n"
    )
    other = "message_when = \"coalesce(headers::jsonb ->> 'origin', '') <> 'import'\""
    reconcile.rules(text=RULES.format(extra=other, groups=groups))
    orders = [Order(number=number, at=START + timedelta(minutes=number)) for number in range(1, 6)]
    for order in orders:
        world.pay(order)
        world.send(order)
    imported = Order(number=5000)
    world.send(imported)
    world.broker.execute("""UPDATE commit_log SET headers = '{"origin": "import"}' WHERE key = '5000'""")
    world.broker.execute("UPDATE commit_log SET tag = 'vip' WHERE key = '2'")
    world.broker.execute("""UPDATE commit_log SET headers = '{"kind": "cart"}' WHERE key = '5'""")
    world.broker.execute("UPDATE subscription SET filter = 'vip || gold' WHERE group_id = %s", [world.groups["points"]])
    world.consume_all()
    world.broker.execute("UPDATE consumer_offset SET start_offset = 2 WHERE group_id = %s", [world.groups["logistics"]])
    result = reconcile.run()
    assert set(reconcile.findings(result)) == {
        *((str(number), "logistics", "UNDELIVERED") for number in (3, 4, 5)),
        ("2", "points", "UNDELIVERED"),
        ("5", "cart", "UNDELIVERED"),
    }
    note = "group points owes an effect for each message that its subscription selects ('vip || gold')"
    assert note in result["rules"][0]["notes"]
