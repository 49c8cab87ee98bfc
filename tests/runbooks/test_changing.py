"""The steps of docs/changing-messages.md and of a move to another broker, while workers and publishers run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.runbooks.machine import Machine
from tests.runbooks.test_runbooks import compare, messages, new_machine, start
from tests.support import eventually

__all__ = ["new_machine"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def assert_all_is_handled(machine: Machine) -> None:
    """Each order has one effect, the broker has one message of each, and both databases agree."""
    orders = machine.assert_each_order_has_one_effect()
    assert orders == sorted(machine.placed())
    assert messages(machine) == Counter(orders)
    assert compare(machine) == {}


def test_a_running_topic_gets_more_and_fewer_queues(new_machine: Callable[..., Machine]) -> None:
    machine = new_machine()
    start(machine)
    for count in ("8", "2"):
        machine.variables["SHOP_QUEUES"] = count
        machine.bash("manage.py migrate --database=broker")
        machine.wait_for_orders(40)
        used = "SELECT count(*) FROM outbox.topic t JOIN outbox.queue USING (topic_id, layout) WHERE name = 'orders'"
        assert machine.ask("OUTBOX_BROKER_URL", used) == [(int(count),)]
    assert_all_is_handled(machine)


def test_a_group_gets_another_name_while_publishers_pause(new_machine: Callable[..., Machine]) -> None:
    machine = new_machine()
    start(machine)
    machine.bash("systemctl stop shop-web")

    def offsets(group: str) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = json.loads(machine.bash(f"manage.py outbox_group offsets {group} --json"))
        return listed

    eventually(lambda: all(one["lag"] == 0 for one in offsets("mails")), within_seconds=60)
    machine.bash("systemctl stop shop-worker")
    queues = [one for one in offsets("mails") if not one["is_retry"]]
    machine.variables |= {"SHOP_GROUP": "letters", "SHOP_START": "latest"}
    machine.bash("systemctl start shop-worker")
    has_begun = "SELECT 1 FROM outbox.queue_lease JOIN outbox.consumer_group USING (group_id) WHERE name = 'letters'"
    eventually(lambda: len(machine.ask("OUTBOX_BROKER_URL", has_begun)) == len(queues), within_seconds=60)
    assert len([one for one in offsets("letters") if not one["is_retry"]]) == len(queues)
    machine.bash("systemctl start shop-web")
    machine.wait_for_orders()
    assert_all_is_handled(machine)
    delete = "manage.py outbox_group delete mails --no-input"
    eventually(lambda: "Done." in machine.bash(delete, codes=(0, 1)), within_seconds=60)


def test_a_topic_gets_another_name_while_messages_are_published(new_machine: Callable[..., Machine]) -> None:
    machine = new_machine()
    start(machine)
    # New handlers beside the old ones, then new publishers beside the old ones, then the old ones end.
    machine.variables["SHOP_TOPICS"] = "orders orders.v2"
    machine.bash("systemctl start shop-worker@new")
    machine.wait_for_orders()
    machine.bash("systemctl stop shop-worker")
    machine.variables["SHOP_PUBLISH"] = "orders.v2"
    machine.bash("systemctl start shop-web@new")
    machine.wait_for_orders(40)
    machine.bash("systemctl stop shop-web")
    machine.wait_for_orders()
    machine.bash("systemctl stop shop-web@new")
    assert_all_is_handled(machine)
    topics = "SELECT t.name FROM outbox.commit_log JOIN outbox.topic t USING (topic_id) GROUP BY 1 ORDER BY 1"
    assert machine.ask("OUTBOX_BROKER_URL", topics) == [("orders",), ("orders.v2",)]
    machine.bash("systemctl stop shop-worker@new")
    machine.variables["SHOP_TOPICS"] = "orders.v2"
    machine.bash("systemctl start shop-worker")
    # It is refused until the leases of the last old consumer have expired.
    delete = "manage.py outbox_topic delete orders --no-input"
    eventually(lambda: "Done." in machine.bash(delete, codes=(0, 1)), within_seconds=60)


def test_a_project_moves_to_another_broker_without_a_pause(new_machine: Callable[..., Machine]) -> None:
    machine = new_machine()
    start(machine)
    old = machine.environment()["OUTBOX_BROKER_URL"]
    machine.bash('psql "$ADMIN_URL" -q -c "CREATE DATABASE broker2"')
    machine.write_environment(
        ADMIN_URL=machine.url("postgres"), APPLICATION_URL=machine.url("shop"), OUTBOX_BROKER_URL=machine.url("broker2")
    )
    machine.bash("manage.py outbox_install")
    machine.bash("systemctl start shop-worker@new shop-web@new")
    machine.wait_for_orders(40)
    machine.bash("systemctl stop shop-web")
    machine.bash("systemctl stop shop-worker")
    machine.bash(f"OUTBOX_BROKER_URL='{old}' manage.py outbox_worker --until-drained")
    machine.wait_for_orders()
    machine.bash("systemctl stop shop-web@new")
    orders = machine.assert_each_order_has_one_effect()
    assert orders == sorted(machine.placed())
    kept = messages(machine)
    machine.write_environment(
        ADMIN_URL=machine.url("postgres"), APPLICATION_URL=machine.url("shop"), OUTBOX_BROKER_URL=old
    )
    before = messages(machine)
    assert kept and before and kept + before == Counter(orders)
