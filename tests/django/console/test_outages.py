"""What the pages say while handlers fail: the error, who holds the lock, what waits, and when the next call comes."""

from __future__ import annotations

import re
from contextlib import closing
from io import StringIO
from uuid import UUID, uuid4

import psycopg
import pytest
from django.core.management import call_command
from django.test import Client
from django.utils.html import escape

from outbox.broker.groups import members
from outbox.broker.groups.registration import ensure_retry_queue
from outbox.broker.operations import broker_conditions, summary
from outbox.broker.operations.conditions import Condition, Severity
from outbox.contrib.console import cards
from outbox.contrib.django.database.aliases import alias_conninfo
from outbox.contrib.django.models import OperatorAction
from outbox.contrib.django.operations import lock_holders
from outbox.contrib.django.operations.watching import look
from tests.django.broker_world import World
from tests.django.console.test_remedies import page, text_of
from tests.django.operators import retried, working
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("no_subscribers", "one_session")

_LOCK = (
    "OperationalError: canceling statement due to lock timeout\nCONTEXT: of a table\n"
    "  raised in ship, /srv/logistics/ship.py:9"
)


def failing(world: World, error: str = _LOCK, *, group: str = "mail") -> tuple[UUID, int, int]:
    """A live process of a group whose handlers have failed for ten minutes; the next call comes in a minute."""
    world.subscribe(group)
    instance = working(world, group, uuid4())
    [(group_id, topic_id)] = world.sql(
        "SELECT group_id, topic_id FROM outbox.consumer_group, outbox.topic"
        " WHERE consumer_group.name = %s AND topic.name = 'orders'",
        group,
    )
    place = instance, group_id, topic_id
    members.report_outage(world.run, *place, error, seconds_ago=600, pause_seconds=60)
    return place


def outage_of(group: str = "mail") -> Condition:
    return next(one for one in look().verdict.conditions if one.name == "outage")


def test_an_outage_has_the_lag_of_its_group_and_rises_with_it(world: World, operator: Client) -> None:
    """More consumers would not help, and the consequence would stand above its cause."""
    failing(world)
    assert outage_of().severity is Severity.WARNING, "nothing waits yet"
    world.publish(2)
    world.subscribe("stock")
    world.age(7200)
    summary.refresh(world.run)
    found = {one.name: one for one in look().verdict.conditions}
    assert [fact["group"] for fact in found["lag"].evidence] == ["stock"]
    [fact] = found["outage"].evidence
    assert (found["outage"].severity, fact["messages"]) == (Severity.CRITICAL, 2)
    order = re.findall(r'<section class="condition[^>]* data-key="(\w+)"', page(operator))
    assert order.index("outage") < order.index("lag")


def test_a_group_whose_connections_are_refused_still_lags(world: World) -> None:
    """The condition `connections_refused` counts no messages. The control is another error."""
    place = failing(world, "OperationalError: FATAL:  sorry, too many clients already")
    world.publish(2)
    world.age(7200)
    summary.refresh(world.run)
    assert "lag" in {one.name for one in look().verdict.conditions}
    members.report_outage(world.run, *place, _LOCK)
    assert "lag" not in {one.name for one in look().verdict.conditions}


def test_retries_are_counted_at_the_first_outage_of_their_group(world: World) -> None:
    instance, group_id, topic_id = failing(world)
    world.publish(1)
    ensure_retry_queue(world.run, group_id, topic_id)
    [(other,)] = world.sql(
        "INSERT INTO outbox.topic (name, message_types, queue_count) SELECT 'bills', message_types, 1 FROM outbox.topic"
        " WHERE name = 'orders' RETURNING topic_id"
    )
    members.report_outage(world.run, instance, group_id, other, _LOCK)
    world.sql(
        "INSERT INTO outbox.consume_queue (queue_id, queue_offset, log_id, attempt)"
        " SELECT queue_id, 0, log_id, 1 FROM outbox.queue JOIN outbox.topic USING (topic_id), outbox.commit_log"
        " WHERE retry_of IS NOT NULL"
    )
    summary.refresh(world.run)
    facts = {fact["topic"]: fact["messages"] for fact in outage_of().evidence}
    assert facts == {"orders": 2, "bills": 0}


def test_a_card_gives_the_first_failure_the_next_call_and_all_lines_of_the_error(
    world: World, operator: Client
) -> None:
    failing(world)
    html = page(operator)
    assert '<span class="clue whole-error">' in html
    assert re.search(r"since (\S+) (\d\d:\d\d:\d\d) lasts 10 min next call \1 \d\d:\d\d:\d\d error", text_of(html))
    assert f'<span class="value">{escape(_LOCK.replace("/srv/", ""))}</span>' in html
    assert "resumes by itself" not in html
    world.sql("UPDATE outbox.consumer_group SET paused = true")
    assert "next call after the group is resumed" in text_of(page(operator))


def test_groups_workers_queues_and_messages_name_the_outage(world: World, operator: Client) -> None:
    place = failing(world)
    world.publish()
    [(message_id,)] = world.sql("SELECT message_id FROM outbox.commit_log")
    shown = {
        path: text_of(page(operator, path))
        for path in ("groups/", "groups/one/?name=mail&topic=orders", "workers/", f"messages/{message_id}/")
    }
    for path, text in shown.items():
        assert "outage" in text, path
    assert "canceling statement" in shown["groups/one/?name=mail&topic=orders"].partition("Held up by")[2]
    assert "CONTEXT: of a table" in shown[f"messages/{message_id}/"]
    call_command("outbox_group", "offsets", "mail", stdout=(out := StringIO()))
    assert "outage: OperationalError" in out.getvalue()
    members.end_outage(world.run, *place, has_succeeded=False)
    for path in shown:
        assert "outage" not in text_of(page(operator, path)), path


def test_the_end_of_an_outage_is_an_incident_of_its_last_process(world: World, operator: Client) -> None:
    members.end_outage(world.run, *failing(world), has_succeeded=False)
    first, second = failing(world), failing(world)
    members.end_outage(world.run, *first, has_succeeded=True)
    assert "mail on orders" not in page(operator, "incidents/")
    members.end_outage(world.run, *second, has_succeeded=True)
    members.end_outage(world.run, *second, has_succeeded=True)
    text = text_of(page(operator, "incidents/?kind=outage"))
    assert re.search(r"outage mail on orders from \S+ \S+ to \S+ \S+ OperationalError: canceling", text)
    assert text.count("mail on orders") == 1


def test_an_outage_that_continues_extends_its_incident(world: World, operator: Client) -> None:
    place = failing(world)
    members.end_outage(world.run, *place, has_succeeded=True)
    [before] = world.sql("SELECT incident_id, split_part(detail, ' to ', 1), at FROM outbox.incident")
    members.report_outage(world.run, *place, "OperationalError: away", seconds_ago=600)
    members.end_outage(world.run, *place, has_succeeded=True)
    [after] = world.sql("SELECT incident_id, split_part(detail, ' to ', 1), at FROM outbox.incident")
    assert after[0] == before[0] and after[2] > before[2]
    assert "OperationalError: away" in page(operator, "incidents/?kind=outage")
    # Of another process, which failed later for the first time.
    world.sql("UPDATE outbox.incident SET at = clock_timestamp()")
    members.report_outage(world.run, *place, _LOCK)
    world.sql("UPDATE outbox.outage SET since = since - interval '10 s'")
    world.sql("UPDATE outbox.incident SET at = clock_timestamp() - interval '5 s'")
    members.end_outage(world.run, *place, has_succeeded=True)
    assert world.sql("SELECT incident_id, split_part(detail, ' to ', 1) FROM outbox.incident") == [after[:2]]
    members.report_outage(world.run, *place, _LOCK)
    members.end_outage(world.run, *place, has_succeeded=True)
    assert world.sql("SELECT count(*) FROM outbox.incident") == [(2,)], "another outage"


def refused(number: int) -> str:
    return (
        f"InternalError: order {number} has no address\nCONTEXT:  PL/pgSQL function check_order() line 3 at RAISE\n"
        "  raised in ship, /srv/logistics/ship.py:9"
    )


def found_failing() -> Condition | None:
    return next((one for one in look().verdict.conditions if one.name == "failing_messages"), None)


def test_messages_that_fail_alike_are_named_with_their_error(world: World, operator: Client) -> None:
    """Although the texts of their errors differ. Those that have failed once may succeed at the next attempt."""
    world.subscribe("mail")
    world.publish(5)
    for number in range(2):
        retried(world, "mail", f"k{number}", refused(number), failures=2)
    retried(world, "mail", "k2", refused(2))
    retried(world, "mail", "k3", "ValueError: no price\n  raised in ship, /srv/logistics/ship.py:8", failures=2)
    assert found_failing() is None
    retried(world, "mail", "k4", refused(4), failures=3)
    condition = found_failing()
    assert condition is not None and condition.severity is Severity.WARNING
    [fact] = condition.evidence
    [(oldest,)] = world.sql("SELECT message_id::text FROM outbox.commit_log WHERE key = 'k0'")
    assert {**fact, "oldest_seconds": 0, "next_attempt": ""} == {
        "group": "mail", "topic": "orders", "messages": 3, "oldest_seconds": 0, "next_attempt": "", "message": oldest,
        "error": refused(0),
    }  # fmt: skip
    [address] = re.findall(r'href="/outbox/(waiting/[^"]*)">Its retries', page(operator))
    assert "k4" in page(operator, address.replace("&amp;", "&"))
    held_up = text_of(page(operator, "groups/one/?name=mail&topic=orders")).partition("Held up by")[2]
    assert re.search(r"retries of orders .* failing 3, next \S+ \S+: InternalError: order 0 has no address", held_up)
    call_command("outbox_group", "offsets", "mail", stdout=(out := StringIO()))
    [line] = [line for line in out.getvalue().splitlines() if "%RETRY%" in line or "retries of" in line]
    assert "failing 3 messages: InternalError: order 0 has no address" in line


def test_attempts_whose_errors_differ_in_the_row_are_one_entry(world: World, operator: Client) -> None:
    world.subscribe("mail")
    world.publish(1)
    [(message_id,)] = world.sql("SELECT message_id::text FROM outbox.commit_log")
    for number, error in enumerate([refused(1), refused(2), "ValueError: no price\n  raised in ship, ship.py:8"]):
        world.sql(
            "INSERT INTO outbox.failure (group_id, log_id, attempt, error) SELECT group_id, log_id, %s, %s"
            " FROM outbox.consumer_group, outbox.commit_log WHERE consumer_group.name = 'mail'",
            number, error,
        )  # fmt: skip
    failures = page(operator, f"messages/{message_id}/").partition('<ol class="failures">')[2].partition("</ol>")[0]
    said = text_of(failures)
    assert re.findall(r"Attempts? [\d to]+ failed", said) == ["Attempts 1 to 2 failed", "Attempt 3 failed"]
    assert "order 2 has no address" in said and "order 1 has no address" not in said


def test_an_outage_has_the_messages_that_fail_with_its_error(world: World) -> None:
    place = failing(world, refused(7))
    world.publish(3)
    for number in range(3):
        retried(world, "mail", f"k{number}", refused(number), failures=2)
    assert found_failing() is None
    members.report_outage(world.run, *place, _LOCK)
    assert found_failing() is not None


def test_only_the_messages_that_are_due_first_are_counted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_conditions, "_RETRIES_COUNTED", 3)
    world.subscribe("mail")
    world.publish(4)
    for number in range(4):
        retried(world, "mail", f"k{number}", refused(number), failures=2)
    condition = found_failing()
    assert condition is not None
    assert [(fact["messages"], fact["of_those_due_first"]) for fact in condition.evidence] == [(3, 3)]


def test_the_queues_whose_messages_are_due_first_are_counted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the fact says that other queues may be left out."""
    monkeypatch.setattr(broker_conditions, "_RETRIES_COUNTED", 3)
    groups = [f"g{number:02}" for number in range(11)]
    world.publish(3)
    for group in groups:
        world.subscribe(group)
        for number in range(3):
            retried(world, group, f"k{number}", refused(number), failures=2)
    world.sql(
        "UPDATE outbox.scheduled SET due_at = now() + interval '1 hour' * (12 - retry_of)"
        " FROM outbox.queue, outbox.topic WHERE queue.queue_id = scheduled.queue_id AND topic.topic_id = queue.topic_id"
    )
    condition = found_failing()
    assert condition is not None
    [(latest,)] = world.sql(
        "SELECT consumer_group.name FROM outbox.scheduled JOIN outbox.queue USING (queue_id)"
        " JOIN outbox.topic USING (topic_id) JOIN outbox.consumer_group ON group_id = retry_of"
        " ORDER BY due_at DESC LIMIT 1"
    )
    assert {fact["group"] for fact in condition.evidence} == {*groups} - {latest}
    assert {fact["of_the_queues_due_first"] for fact in condition.evidence} == {30}


def test_after_a_lock_timeout_the_session_that_holds_the_lock_is_named(
    world: World, operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(world)
    failing(world, "ConnectionError: away", group="stock")
    assert not any("lock_holder" in fact for fact in outage_of().evidence)
    monkeypatch.setattr(lock_holders, "_SECONDS", 0)
    with closing(psycopg.connect(alias_conninfo("default"), application_name="nightly-export")) as holder:
        holder.execute("LOCK TABLE auth_group IN SHARE MODE")
        facts = {fact["group"]: fact for fact in outage_of().evidence}
        assert "lock_holder" not in facts["stock"]
        assert facts["mail"]["lock_holder"] == f"session {holder.info.backend_pid} of nightly-export"
        assert facts["mail"]["locks"] == "auth_group (Share)"
        assert facts["mail"]["state"] == "idle in transaction"
        assert f"to end it SELECT pg_terminate_backend({holder.info.backend_pid})" in text_of(page(operator))
        world.run.connection.execute(str(facts["mail"]["to_end_it"]).encode())
        eventually(lambda: not any("lock_holder" in fact for fact in outage_of().evidence))


def test_a_writer_is_only_a_possible_holder_and_ranks_after_a_lock_of_a_table(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(world)
    failing(world, "QueryCanceled: canceling statement due to statement timeout", group="stock")
    monkeypatch.setattr(lock_holders, "_SECONDS", 0)
    with (
        closing(psycopg.connect(alias_conninfo("default"), application_name="slow-writer")) as writer,
        closing(psycopg.connect(alias_conninfo("default"))) as locker,
    ):
        writer.execute("DELETE FROM auth_group WHERE false")
        facts = {fact["group"]: fact for fact in outage_of().evidence}
        assert facts["mail"]["possible_lock_holder"] == f"session {writer.info.backend_pid} of slow-writer"
        assert not {"lock_holder", "to_end_it"} & facts["mail"].keys()
        assert "possible_lock_holder" not in facts["stock"], "a statement timeout is no sign of a lock"
        locker.execute('CREATE TABLE "two\nlines" ()')
        locker.commit()
        locker.execute('DROP TABLE "two\nlines"')
        [fact] = [fact for fact in outage_of().evidence if fact["group"] == "mail"]
        locker.commit()
        assert str(fact["lock_holder"]).startswith(f"session {locker.info.backend_pid} of ")
        assert str(fact["lock_holder"]).endswith(", or 1 more")
        assert "two\\nlines (AccessExclusive)" in str(fact["locks"])


def test_retries_that_are_due_are_found_from_their_count(world: World, operator: Client) -> None:
    """A retry topic has no page, and the list of waiting messages does not have what is in a queue."""
    world.subscribe("mail")
    world.publish(1)
    [(group_id, topic_id)] = world.sql("SELECT group_id, topic_id FROM outbox.subscription")
    ensure_retry_queue(world.run, group_id, topic_id)
    world.sql(
        "INSERT INTO outbox.consume_queue (queue_id, queue_offset, log_id, attempt)"
        " SELECT queue_id, 0, log_id, 1 FROM outbox.queue JOIN outbox.topic USING (topic_id), outbox.commit_log"
        " WHERE retry_of IS NOT NULL"
    )
    summary.refresh(world.run)
    html = page(operator, "waiting/?retrying=yes")
    assert "1 of mail" in text_of(html)
    [address] = re.findall(r'href="/outbox/(groups/one/[^"]+)">1 of mail', html)
    assert "retries of orders" in page(operator, address.replace("&amp;", "&"))
    fact = {"group": "mail", "topic": "%RETRY%mail"}
    lag = broker_conditions.CONDITIONS["lag"].condition(Severity.WARNING, [fact], 1)
    [card] = cards.cards([lag])
    for item in card.evidence[0].items:
        assert "retries of orders" in page(operator, item.url.removeprefix("/outbox/")), item


def test_the_card_of_a_paused_group_leads_to_who_paused_it(world: World, operator: Client) -> None:
    world.subscribe("mail")
    world.publish(1)
    world.sql("UPDATE outbox.consumer_group SET paused = true")
    OperatorAction.objects.create(action="pause", who="ada", why="the warehouse moves", subject="group mail")
    summary.refresh(world.run)
    [address] = re.findall(r'href="/outbox/(audit/[^"]*)">Who paused it', page(operator))
    assert "the warehouse moves" in page(operator, address)
