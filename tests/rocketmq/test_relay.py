"""The relay: messages in order or with a delivery time, published in local transactions, reach RocketMQ in order."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest
from django.db import transaction
from django.db.models.functions import Now

from outbox.contrib.django import publish
from outbox.contrib.django.engine import broker as broker_access
from outbox.contrib.rocketmq.apps import FAULT_POINTS
from outbox.contrib.rocketmq.models import RelayLease
from outbox.contrib.rocketmq.relay_rows import backlog, rows_on
from tests.rocketmq.relay_project import RelayProject, in_threads, make_relay_project, watching
from tests.rocketmq_server import PrivateRocketMQ
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("application")

KILLED = -signal.SIGKILL
STEPS = FAULT_POINTS


@pytest.fixture
def project(
    rocketmq: PrivateRocketMQ, application: None, outbox_settings: Callable[..., None]
) -> Iterator[RelayProject]:
    """A project, whose settings are also those of this process."""
    project = make_relay_project(rocketmq)
    outbox_settings(**project.outbox)
    yield project
    broker_access.reset_broker()


def all_sent() -> None:
    """Wait until the relay has sent and deleted every row."""
    eventually(
        lambda: not rows_on("default").exists(),
        within_seconds=60,
        what=lambda: str(list(rows_on("default").values_list("key", "attempts", "error", "parked_at")[:5])),
    )


def place(project: RelayProject, keys: list[str], rounds: int) -> None:
    """Orders of these keys from a thread per key; some roll back, some roll back to a savepoint."""

    def place_of(key: str) -> None:
        for number in range(rounds):
            project.commit(key, f"{key}-c{number}")
            project.commit(key, f"{key}-r{number}", fail=True)
            with transaction.atomic():
                project.commit(key, f"{key}-s{number}", fail=True)
                project.commit(key, f"{key}-d{number}")

    in_threads([lambda key=key: place_of(key) for key in keys])


def test_committed_messages_arrive_in_the_order_of_their_commits(project: RelayProject) -> None:
    with watching(project) as seen, project.running("relay"), project.running("consumer"):
        place(project, ["a", "b", "c"], 5)
        all_sent()
        eventually(lambda: len(project.effects()) == 30, within_seconds=60)
        eventually(lambda: seen.first() == project.committed(), within_seconds=60, what=lambda: str(seen.by_key))
    by_key = {key: [one for one in project.effects() if one.startswith(key)] for key in "abc"}
    assert by_key == project.committed()
    assert seen.duplicates() == 0


def test_a_delivery_time_is_kept_and_an_overdue_message_is_sent_at_once(project: RelayProject) -> None:
    due = datetime.now(UTC) + timedelta(seconds=12)
    with transaction.atomic():
        publish(project.later.name, "later", deliver_at=due)
        publish(project.later.name, "overdue", deliver_at=datetime.now(UTC) - timedelta(hours=1))
        publish(project.later.name, "half")
        assert backlog("default").waiting == 2, "a message without a delivery time is a half message"
    with project.running("consumer"), project.running("relay"):
        eventually(lambda: len(project.effects()) == 3, within_seconds=60, what=lambda: str(project.effects()))
        assert datetime.now(UTC) >= due
    assert project.effects()[2] == "later"


def test_relay_killed_at_each_step(project: RelayProject) -> None:
    """Each one continues what the killed ones before it have left. The last one waits for a killed one's lease."""
    with watching(project) as seen:
        for step in STEPS:
            RelayLease._base_manager.update(expires_at=Now())
            # A relay may send all messages in one round.
            visit = 2 if "send" in step else 1
            with project.running("relay", faults=f"{step}=kill@{visit}") as killed:
                for number in range(4):
                    project.commit("a", f"{step}-a{number}")
                    project.commit("b", f"{step}-b{number}")
                assert killed.wait(60) == KILLED, step
        with project.running("relay"):
            all_sent()
            eventually(lambda: seen.first() == project.committed(), within_seconds=60, what=lambda: str(seen.by_key))


def test_two_relays_and_a_frozen_one_keep_the_order(project: RelayProject) -> None:
    """The first relay freezes with a taken message that it has not sent; it continues after the second one."""
    with watching(project) as seen, project.running("relay", faults="relay.before_send=stop@1") as frozen:
        for number in range(3):
            project.commit("a", f"a{number}")
        eventually(lambda: rows_on("default").filter(taken_at__isnull=False).exists())
        with project.running("relay"):
            all_sent()
            frozen.send_signal(signal.SIGCONT)
            for number in range(3, 6):
                project.commit("a", f"a{number}")
            all_sent()
            eventually(lambda: seen.first() == project.committed(), within_seconds=60, what=lambda: str(seen.by_key))
    assert seen.duplicates() == 0, "the frozen relay looks at its lease before each send"


def test_a_send_that_was_frozen_is_a_duplicate_and_has_no_second_effect(project: RelayProject) -> None:
    """Control of the limit that the documents name: the relay freezes behind the look at its lease."""
    with watching(project) as seen, project.running("consumer"):
        with project.running("relay", faults="relay.in_send=stop@1") as frozen:
            project.commit("a", "a0")
            project.commit("a", "a1")
            eventually(lambda: rows_on("default").filter(taken_at__isnull=False).exists())
            with project.running("relay"):
                all_sent()
                frozen.send_signal(signal.SIGCONT)
                eventually(lambda: seen.by_key["a"] == ["a0", "a1", "a0"], within_seconds=60, what=lambda: str(seen))
        eventually(lambda: len(project.effects()) >= 2, within_seconds=60)
    assert project.effects() == ["a0", "a1"]


def test_server_killed_and_restarted(project: RelayProject, rocketmq: PrivateRocketMQ) -> None:
    """Also the consumer of this process connects again, although a warning is an error here."""
    with watching(project) as seen, project.running("relay"):
        project.commit("a", "before")
        all_sent()
        rocketmq.kill()
        project.commit("a", "while-away")
        project.commit("b", "rolled-back", fail=True)
        eventually(lambda: rows_on("default").filter(attempts__gt=0).exists(), within_seconds=60)
        project.commit("a", "while-away-2")
        rocketmq.start()
        all_sent()
        eventually(lambda: seen.first() == project.committed(), within_seconds=60, what=lambda: str(seen.by_key))
    assert project.committed() == {"a": ["before", "while-away", "while-away-2"]}


def test_a_rejected_message_is_parked_and_blocks_its_key_only(project: RelayProject) -> None:
    from outbox.contrib.rocketmq import relay_rows

    # RocketMQ's proxy allows 64 bytes for a message group.
    long = "k" * 200
    with watching(project) as seen, project.running("relay"):
        for number in ("rejected", "behind"):
            with transaction.atomic():
                publish(project.steps.name, number, key=long)
        project.commit("b", "other")
        eventually(lambda: backlog("default").parked, within_seconds=60)
        parked = rows_on("default").get(parked_at__isnull=False)
        eventually(lambda: seen.first() == {"b": ["other"]}, within_seconds=60)
        assert bytes(parked.body) == b'"rejected"' and "message" in parked.error.lower()
        assert (backlog("default").waiting, backlog("default").parked) == (1, 1)
        assert relay_rows.discard("default", parked.message_id) == 1
        # The next one of the key is rejected in its turn.
        eventually(lambda: backlog("default").parked == 1 and backlog("default").waiting == 0, within_seconds=60)
        rows_on("default").all().delete()
