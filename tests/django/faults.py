"""Faults of the broker, of transactions and of the server, made for real; each is named as its condition."""

from __future__ import annotations

import contextlib
from uuid import uuid4

import psycopg
import pytest
from django.db import connections, transaction

from outbox.broker.log.failing import FailureNote, ProcessPart
from outbox.broker.operations import audit, summary
from outbox.broker.transaction.turns import CHECK_BACK
from outbox.contrib.django import publish
from outbox.contrib.django.database.aliases import broker_database
from outbox.contrib.django.engine.broker import flush, get_broker
from outbox.contrib.django.operations.comparing import run_compare
from outbox.contrib.django.publishing.checkback import run_check_back
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.worker.periodic import passes
from outbox.errors import WrongDatabase
from outbox.transaction import Answer, Decision, EndTransaction
from tests.django.broker_world import NOWHERE, World, fault
from tests.django.conftest import point_alias
from tests.django.support import sequence


@fault("critical", storms=("away",), seconds=20)
def unreachable(world: World) -> None:
    """The broker's database is down."""
    point_alias("broker", NOWHERE)


@fault("critical")
def schema_version(world: World) -> None:
    """A newer version of the code has changed the tables so that this one cannot use them."""
    world.sql("UPDATE outbox.schema_version SET minimum_code = 99")


@fault("critical", storms=("away", "deaths"), seconds=45)
def no_sequencer(world: World) -> None:
    """Every broker process is stopped."""
    world.sql("UPDATE outbox.leader_lease SET expires_at = now() - interval '1 minute'")


@fault("critical")
def part_missing(world: World) -> None:
    """The only service with a part of the leader runs no worker, or has turned the part off."""
    world.sql("INSERT INTO outbox.schema_version (name, version, leads) VALUES ('greetings', 1, true)")
    world.sql("UPDATE outbox.leader_lease SET lacks = '{greetings}', stands_in = true")


@fault("critical", storms=("away",), seconds=90)
def process_failing(world: World) -> None:
    """A process leads, and the server refuses its statements."""
    note = FailureNote(broker_database(), ProcessPart.SEQUENCING)
    for _ in range(2):
        with contextlib.suppress(psycopg.Error), note.watching():
            world.sql("SELECT outbox.tick_v0()")


@fault("warning", storms=("away", "deaths"), seconds=45)
def ticks_late(world: World) -> None:
    """A process leads, but does not sequence messages."""
    publish("orders", {}, key="unread", at_once=True)
    flush(within_seconds=5)
    world.age(30)


@fault("warning", storms=("away", "deaths"), seconds=60)
def summary_late(world: World) -> None:
    """A process leads, but does not refresh the summary."""
    summary.refresh(world.run)
    world.sql("UPDATE outbox.summary SET at = at - interval '1 hour'")


@fault("critical", storms=("away", "deaths"), seconds=60)
def check_back_late(world: World) -> None:
    """No process runs check-back of a service."""
    [check_back] = [one for one in passes() if one.name == CHECK_BACK]
    check_back.run()
    world.sql("UPDATE outbox.periodic_pass SET began_at = began_at - interval '5 minutes'")


@fault("warning")
def unanswered(world: World) -> None:
    """A producer died in a transaction, and its service does not start again."""
    world.half()
    world.age(300)


@fault("warning")
def parked(world: World) -> None:
    """Check-back cannot find out the outcome of a transaction."""
    world.half()
    for _ in range(get_settings().check.max_checks):
        world.sql("UPDATE outbox.pending_check SET due_at = now()")
        claimed = get_broker().claim_checks("shop")
        answers = [Answer(transaction_id=one.transaction_id, decision=Decision.UNKNOWN) for one in claimed]
        get_broker().report_answers("shop", answers)


@fault("critical")
def contradicted(world: World) -> None:
    """Processes report a commit and a rollback of the same transaction."""
    world.half()
    [(transaction_id,)] = world.sql("SELECT transaction_id FROM outbox.pending_check")
    for decision in (Decision.COMMIT, Decision.ROLLBACK):
        get_broker().end([EndTransaction(transaction_id=transaction_id, decision=decision, producer_group="shop")])


@fault("warning")
def refused(world: World) -> None:
    """A process reports the commit of an unknown transaction."""
    get_broker().end([EndTransaction(transaction_id=uuid4(), decision=Decision.COMMIT, producer_group="shop")])


@fault("critical")
def wrong_ledger(world: World) -> None:
    """The ledger is emptied while a transaction is undecided."""
    world.half()
    with connections["default"].cursor() as cursor:
        cursor.execute("TRUNCATE outbox_ledger")
    run_check_back()


@fault("warning")
def transaction_open(world: World) -> None:
    """A session leaves its transaction open."""
    world.limits(TRANSACTION_SECONDS=(0, None))
    session = world.session("a report")
    session.execute("BEGIN")
    session.execute("SELECT pg_current_xact_id()")


@fault("critical")
def lock_held(world: World) -> None:
    """A migration locks a table for writers and readers."""
    session = world.session("a migration")
    session.execute("BEGIN")
    session.execute("LOCK TABLE outbox.consumer_group IN ACCESS EXCLUSIVE MODE")


@fault("warning")
def space(world: World) -> None:
    """The broker's tables become larger than the threshold."""
    world.limits(SPACE_BYTES=(1, None))


@fault("warning")
def replica_lag(world: World) -> None:
    """A replica is gone, and its replication slot keeps WAL."""
    world.limits(REPLICA_LAG_BYTES=(0, None))
    name = f"gone_{uuid4().hex}"
    world.sql("SELECT pg_create_physical_replication_slot(%s, true)", name)
    world.stack.callback(world.sql, "SELECT pg_drop_replication_slot(%s)", name)


@fault("critical")
def path_flipped(world: World) -> None:
    """The alias of the broker has an open connection to another database, as after an unfinished failover."""
    connections["default"].ensure_connection()
    with pytest.MonkeyPatch.context() as moved:
        moved.setitem(connections["default"].settings_dict, "NAME", connections["broker"].settings_dict["NAME"])
        world.change_settings(BROKER="default")
        with pytest.raises(WrongDatabase), transaction.atomic():
            publish("orders", {})
    world.change_settings(BROKER="broker")


@fault("critical")
def not_conserved(world: World) -> None:
    """A queue entry is deleted by hand."""
    world.publish(2)
    world.sql("DELETE FROM outbox.consume_queue WHERE log_id = (SELECT min(log_id) FROM outbox.consume_queue)")
    assert audit.run_once(world.run).differences


@fault("critical", storms=("restore of the broker",), seconds=9000)
def lost_messages(world: World) -> None:
    """The broker's database is restored to a time before a message was stored."""
    with transaction.atomic():
        publish("orders", {}, key="lost")
    sequence()
    for table in ("consume_queue", "op_log", "commit_log"):
        world.sql(f"DELETE FROM outbox.{table}")
    assert run_compare().lost_messages == 1


@fault("critical")
def lost_commits(world: World) -> None:
    """The application's database is restored to a time before a transaction whose message was queued."""
    with transaction.atomic():
        publish("orders", {}, key="lost")
    sequence()
    with connections["default"].cursor() as cursor:
        # Past the trigger that protects these rows, as a restore goes.
        cursor.execute("SET session_replication_role = replica")
        cursor.execute("DELETE FROM outbox_ledger")
        cursor.execute("RESET session_replication_role")
    assert run_compare().lost_commits == 1


@fault("warning")
def rejecting(world: World) -> None:
    """An operator sets the broker to refuse transactional messages, and does not end this."""
    world.sql("UPDATE outbox.broker SET reject_transactional = true")
