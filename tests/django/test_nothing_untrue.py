"""No condition and no figure says what is not so: a message in every state, before every comparison and rule."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from uuid import UUID, uuid4

import psycopg
import pytest
from django.db import connections
from django.utils import timezone

from outbox import Delivery, RetryPolicy
from outbox.broker import deaths
from outbox.broker.consumer.running_calls import LastCalls
from outbox.broker.database.executor import Row
from outbox.broker.groups.quarantine import RunningCall
from outbox.broker.log import recall
from outbox.broker.operations import broker_conditions, changes, rules, summary
from outbox.broker.operations.conditions import Condition, Severity
from outbox.broker.operations.dead_letters import LetterSelection
from outbox.broker.operations.search import unfinished_deliveries
from outbox.broker.operations.trace import trace
from outbox.broker.supervisor import ChildDeath
from outbox.contrib.django import ClaimedDelivery, publish, subscriber
from outbox.contrib.django.actions.messages import settle_letters
from outbox.contrib.django.database.aliases import alias_conninfo, broker_database
from outbox.contrib.django.models import ClaimEntry, InboxEntry
from outbox.contrib.django.operations.comparing import CompareCounts, run_compare
from outbox.contrib.django.operations.known_conditions import catalogue
from outbox.contrib.django.operations.raised import by_subject
from outbox.contrib.django.operations.watching import look, probe, run_audit
from outbox.contrib.django.worker.workers import consumer_runtime
from outbox.contrib.limits import Limits
from outbox.erased import ERASED_CONTENT_TYPE
from outbox.errors import PermanentError
from outbox.events import declaration, event
from tests.django.broker_world import World, new_world
from tests.django.support import ended, sequence
from tests.part_apps import has
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("databases", "no_subscribers")

LATER = RetryPolicy(delays_seconds=[3600.0])


@pytest.fixture
def world(databases: None, outbox_settings: Callable[..., None]) -> Iterator[World]:
    with new_world(outbox_settings) as world:
        yield world
    ClaimEntry.objects.all().delete()


@dataclass
class Known:
    """What the consumers know of the event `known`."""


@dataclass
class States:
    """One group per state. A handler waits, fails or returns as its group needs."""

    answer: threading.Event = field(default_factory=threading.Event)
    is_broken: bool = True

    def declare(self) -> None:
        event("known", topic="orders")(Known)

        @subscriber("orders", group="handled", tag="handled")
        @subscriber("orders", group="deleted", tag="deleted")
        @subscriber("orders", group="limited", tag="limited", options=[Limits(rate="1/h")])
        @subscriber("orders", group="overdue", tag="overdue")
        @subscriber("payments", group="paused")
        def handle(delivery: Delivery) -> None: ...

        @subscriber("orders", group="open", tag="open")
        def in_transaction(delivery: Delivery) -> None:
            assert self.answer.wait(60)

        @subscriber("orders", group="claimed", tag="claimed", effects="outside")
        @subscriber("orders", group="claimed_elsewhere", tag="claimed_elsewhere", effects="outside")
        @subscriber("orders", group="claimed_failing", tag="claimed_failing", effects="outside", retry=LATER)
        def outside(delivery: ClaimedDelivery) -> None:
            if delivery.tag == "claimed_failing":
                raise ValueError
            assert self.answer.wait(60)

        @subscriber("orders", group="newer", tag="newer")
        @subscriber("orders", group="newer_recalled", tag="newer_recalled")
        def typed(delivery: Delivery[Known]) -> None: ...

        @subscriber("orders", group="retried", tag="retried", retry=LATER)
        @subscriber("orders", group="retry_recalled", tag="retry_recalled", retry=LATER)
        @subscriber("orders", group="erased", tag="erased", retry=LATER)
        @subscriber("orders", group="behind", tag="behind", on_error={ValueError: "retry_later"})
        @subscriber("orders", group="blocked", tag="blocked", mode="orderly")
        @subscriber("orders", group="stopped", tag="stopped", mode="orderly", on_error={ValueError: "stop"})
        def fail(delivery: Delivery) -> None:
            raise ValueError

        @subscriber("orders", group="dead", tag="dead")
        @subscriber("orders", group="discarded", tag="discarded")
        @subscriber("orders", group="replayed", tag="replayed")
        def give_up(delivery: Delivery) -> None:
            if self.is_broken:
                raise PermanentError


def published(tag: str, **options: object) -> UUID:
    return publish("orders", {}, key=tag, tag=tag, at_once=True, **options).message_id  # type: ignore[arg-type]


def looked(name: str) -> Row:
    """What the status shows of a group."""
    found = look().overview
    assert found is not None
    [group] = [one for one in found.groups if one.name == name]
    return group


def figures(name: str) -> dict[str, int]:
    """The figures of a group that are not 0; what its filter would leave out may count as lag, too."""
    group = looked(name)
    names = ("handled", "lag", "claimed", "retrying", "dead", "timed_out")
    return {name: min(number, 1) for name in names if (number := getattr(group, name))}


@pytest.mark.slow
def test_a_message_in_each_state_is_neither_lost_nor_counted_as_another(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.stack.enter_context(declaration.restored())
    states = States()
    states.declare()
    stop = threading.Event()
    consumers = consumer_runtime()
    consumers.run_once()
    changes.pause(world.run, "paused")
    assert run_compare() == CompareCounts()
    monkeypatch.setattr(broker_conditions, "_FEW_SENT_BACK", 1)
    summary.refresh(world.run)
    world.sql("UPDATE outbox.summary SET at = at - interval '90 seconds'")

    newer = {"outbox-event": "known", "outbox-event-version": "2"}
    ids = {tag: published(tag) for tag in ("handled", "open", "claimed", "claimed_failing", "retried", "behind")}
    ids |= {tag: published(tag) for tag in ("retry_recalled", "blocked", "stopped", "dead", "discarded", "replayed")}
    ids |= {tag: published(tag, headers=newer) for tag in ("newer", "newer_recalled")}
    ids |= {"overdue": published("overdue", timeout=0.001), "erased": published("erased")}
    ids |= {tag: published(tag) for tag in ("limited", "limited", "claimed_elsewhere")}
    if has("erasure"):
        erasing = import_module("outbox.contrib.erasure.erasing")
        request = erasing.ErasureRequest(topic="orders", message_ids=[ids["erased"]])
        erasing.erase(request, reason="asked", dry_run=False)
    else:
        world.sql(
            "UPDATE outbox.commit_log SET body = '', content_type = %s WHERE message_id = %s",
            *(ERASED_CONTENT_TYPE, ids["erased"]),
        )
    ClaimEntry.objects.create(
        group="claimed_elsewhere", generation=1, message_id=ids["claimed_elsewhere"], token=1, attempt=1,
        claimed_by="another", claimed_at=timezone.now(), expires_at=timezone.now() + timedelta(hours=1),
    )  # fmt: skip
    publish("payments", {}, key="paused", at_once=True)
    publish("reminders", {}, key="delayed", delay=3600, at_once=True)
    recalled = publish("reminders", {}, key="recalled", delay=3600, at_once=True).message_id
    recall.recall(world.run, [recalled])
    world.half()
    sequence()
    thread = threading.Thread(target=consumers.run, args=[stop])
    thread.start()
    world.stack.callback(thread.join, 30)
    world.stack.callback(stop.set)
    world.stack.callback(states.answer.set)

    counted: dict[str, dict[str, int]] = {
        "handled": {"handled": 1},
        "erased": {"handled": 1},
        "open": {"lag": 1},
        "claimed": {"claimed": 1},
        "claimed_elsewhere": {"claimed": 1},
        "claimed_failing": {"retrying": 1},
        "retried": {"retrying": 1},
        "retry_recalled": {"retrying": 1},
        "behind": {"retrying": 1},
        "blocked": {"lag": 1},
        "stopped": {"lag": 1},
        "dead": {"dead": 1},
        "discarded": {"dead": 1},
        "replayed": {"dead": 1},
        "limited": {"handled": 1, "lag": 1},
        "overdue": {"timed_out": 1},
        "newer": {"retrying": 1},
        "newer_recalled": {"retrying": 1},
        "paused": {"lag": 1},
    }

    def seen() -> dict[str, dict[str, int]]:
        return {name: figures(name) for name in counted}

    eventually(lambda: seen() == counted, within_seconds=10, what=lambda: str(seen()))
    [(log_id, group_id)] = world.sql(
        "SELECT log_id, group_id FROM outbox.commit_log, outbox.consumer_group WHERE tag = 'open' AND name = 'open'"
    )
    left = LastCalls(instance=uuid4(), told_to_stop=False, calls=[RunningCall(group_id, [log_id], alone=False)])
    deaths.record(broker_database(), ChildDeath(child="consumer-1", how="exit code 3", hung=True, left_behind=left))

    def nothing_untrue(*more: str) -> None:
        assert run_compare() == CompareCounts()
        sequence()
        assert run_audit()["differences"] == []
        summary.refresh(world.run)
        found = {one.name: one for one in look().verdict.conditions}
        assert sorted(found) == sorted(
            ["blocked_queue", "dead_letters", "group_paused", "retry_storm", "stopped_queue", *more]
        )
        failing = {fact["group"] for fact in found["retry_storm"].evidence}
        # The server ends the transaction of `open`, which is idle, so that this message may be a retry, too.
        assert failing - {"open"} == {"behind", "claimed_failing", "retried", "retry_recalled"}

    def states_of(*names: str) -> dict[str, list[str]]:
        return {name: entries(world, ids[name], name) for name in names}

    nothing_untrue("hung_handlers", "unknown_version")
    assert entries(world, ids["newer"], "newer")[0] == "left its queue"
    assert states_of("handled", "open", "claimed", "retried", "dead", "overdue") == {
        "handled": ["handled"],
        "open": ["waiting"],
        "claimed": ["claimed"],
        "retried": ["sent back"],
        "dead": ["dead"],
        "overdue": ["timed out"],
    }

    [(claimed_id,)] = world.sql("SELECT log_id FROM outbox.commit_log WHERE tag = 'claimed'")
    assert unfinished_deliveries(world.run, [claimed_id])[claimed_id].retrying == 0, "the search names it as retrying"
    recall.recall(world.run, [ids["retry_recalled"]])

    def newer_recalled() -> bool:
        recall.recall(world.run, [ids["newer_recalled"]])
        return entries(world, ids["newer_recalled"], "newer_recalled")[-1] == "recalled"

    eventually(newer_recalled, what="the recall of a message that waits for newer code")
    settle_letters("discarded", LetterSelection(), replay=False, limit=10, dry_run=False)
    states.is_broken = False
    settle_letters("replayed", LetterSelection(), replay=True, limit=10, dry_run=False)
    assert states_of("replayed", "retry_recalled") == {
        "replayed": ["sent back"],
        "retry_recalled": ["recalled"],
    }
    states.answer.set()

    def done(name: str) -> bool:
        sequence()
        summary.refresh(world.run)
        return figures(name) == {"handled": 1}

    for name in ("claimed", "replayed"):
        eventually(lambda name=name: done(name), what=lambda name=name: str(figures(name)))  # type: ignore[misc]
    nothing_untrue("hung_handlers", "unknown_version")
    assert states_of("claimed", "replayed") == {
        "claimed": ["left its queue", "handled or skipped"],
        "replayed": ["dead", "handled"],
    }
    # The control: the comparison sees an effect that has vanished.
    InboxEntry.objects.filter(message_id=ids["handled"]).delete()
    published("handled")
    sequence()
    eventually(lambda: InboxEntry.objects.filter(group="handled").exists(), what="the next message")
    assert run_compare() == CompareCounts(lost_effects=1)


def entries(world: World, message_id: UUID, group: str) -> list[str]:
    """The states of a message's entries in one group."""
    found = trace(world.run, message_id)
    assert found is not None
    return [str(one.state) for one in found.entries if one.group == group]


def test_what_was_done_before_a_crash_is_counted_once(world: World) -> None:
    """A crash may lose the stored offsets: the messages come again, and the inbox knows them."""

    @subscriber("orders", group="handled")
    def handle(delivery: Delivery) -> None: ...

    consumer_runtime().run_once()
    world.publish(5)
    consumer_runtime().run_once()
    assert figures("handled") == {"handled": 1} and looked("handled").handled == 5
    world.sql("DELETE FROM outbox.consumer_offset WHERE ordinal > 0 OR epoch > 0")
    consumer_runtime().run_once()
    assert (looked("handled").handled, looked("handled").lag) == (5, 0)
    assert run_audit()["differences"] == []


def test_what_cannot_be_read_is_unknown_in_every_output_and_read_again_later(world: World) -> None:
    """The server ends the sessions of a command that looks again and again."""
    assert look().verdict.conditions == []
    assert connections["default"].connection is not None
    with psycopg.connect(alias_conninfo("broker"), autocommit=True) as server:
        pid = connections["default"].connection.info.backend_pid
        server.execute("SELECT pg_terminate_backend(%s)", [pid])
    found = look()
    unread = {condition.name: condition for condition in found.verdict.conditions}
    assert all(condition.is_unknown for condition in unread.values())
    one = unread["reconciliation_findings"]
    assert (one.name, one.severity, one.is_unknown) == ("reconciliation_findings", Severity.WARNING, True)
    assert one.meaning.startswith("It is unknown") and "open findings" not in one.text
    assert one.next_step != catalogue()[one.name].next_step
    shown = {condition["name"]: condition for condition in found.as_json()["conditions"]}
    assert shown[one.name]["is_unknown"] is True
    if has("console"):
        cards = import_module("outbox.contrib.console.cards").cards
        carded = {card.condition.name: card.condition for card in cards(found.verdict.conditions)}
        assert (carded[one.name].meaning, carded[one.name].next_step) == (one.meaning, one.next_step)
    if has("prometheus"):
        collector = import_module("outbox.contrib.prometheus.collector")
        _, rows = collector._conditions(collector.ScrapeState(found.verdict, judged=list(catalogue())))
        assert {labels[0] for labels, _ in rows} == set(catalogue()) - set(unread)
    assert by_subject(found.verdict.conditions) == ({}, set(unread))
    assert look().verdict.conditions == [], "the next look has opened a new connection"


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("SET LOCAL statement_timeout = 20; SELECT pg_sleep(60)", "canceling statement due to statement timeout"),
        ("SELECT 1 / 0", "division by zero"),
    ],
    ids=["a timeout of the role", "another error"],
)
def test_a_broker_that_does_not_execute_a_statement_is_not_called_away(
    world: World, statement: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers, so status and probe say what happened, and that the other conditions are unknown."""
    monkeypatch.setattr(rules, "check_schema", lambda connection, schema: connection.execute(statement))
    monkeypatch.setattr(rules, "leadership", lambda run: run.connection.execute(statement))
    for found in (look().verdict, probe()):
        [one] = found.conditions
        assert (one.name, one.severity, found.is_complete) == ("unreachable", Severity.CRITICAL, False)
        assert "does not answer" not in one.text and "publishing fails" not in one.text
        assert reason in one.text
        assert "timeout" in one.next_step and "server runs" not in one.next_step
    code, said = ended("outbox_status")
    assert code == Severity.CRITICAL
    assert "did not answer" not in said and "every other condition is unknown" in said


def test_people_see_the_beginning_of_a_long_error_and_json_has_all_of_it() -> None:
    error = f"ValueError: \x1b[2J{'x' * 4000}\nsecond line, postgresql://shop:secret@db/shop"
    command = f"outbox_group reset {'g' * 200} {'t' * 200}"
    fact = {"group": "mail", "error": error, "topic": "orders", "command": command}
    one = Condition("outage", Severity.WARNING, [fact], 1, "A subscription pauses.")
    assert one.text.startswith(r"A subscription pauses. (group mail, error ValueError: \x1b[2Jxxx")
    assert one.text.endswith(f"xxx…, topic orders, command {command})") and len(one.text) < 900
    assert one.as_json()["evidence"] == [fact]
