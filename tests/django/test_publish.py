"""publish() on both paths: committed is delivered, rolled back is not."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from django.core.management import CommandError, call_command
from django.db import IntegrityError, connections, transaction
from django.test.utils import override_settings
from django.utils import timezone

from outbox import Decision, EndTransaction
from outbox.contrib.django import (
    get_broker,
    message,
    publish,
    publish_many,
    publish_messages,
    run_check_back,
    subscriber,
    transactional_message,
)
from outbox.contrib.django.database.aliases import alias_conninfo
from outbox.contrib.django.engine.broker import reset_broker
from outbox.contrib.django.ledger import ledger
from outbox.contrib.django.models import LedgerEntry, LedgerIdentity
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.worker.workers import consumer_runtime
from outbox.errors import (
    BrokerUnavailable,
    ConfigurationError,
    InvalidMessage,
    MessageTypeMismatch,
    SchemaError,
    TransactionAlreadyRolledBack,
    TransactionUsageError,
    UsageError,
)
from outbox.time_limit import TIMEOUT_HEADER
from tests.django.configured import OUTBOX
from tests.django.conftest import point_alias
from tests.django.sessions import broker_connection
from tests.django.shop.models import Order, Payment
from tests.django.state import decisions, renamed, rolled_back, stored

pytestmark = pytest.mark.usefixtures("empty_log")


def order(number: str, **options: Any) -> None:
    Order.objects.using(options.get("using") or "default").create(number=number)
    publish("orders", {"number": number}, key=number, **options)


def test_committed_is_decided_commit_and_rolled_back_is_not(path: str) -> None:
    with transaction.atomic():
        order("kept")
    with rolled_back():
        order("dropped")
    two_phase = path == "two_phase"
    assert decisions() == ({"kept": "C", "dropped": None} if two_phase else {"kept": "C"})
    if two_phase:
        assert run_check_back().rolled_back == 1
        assert decisions() == {"kept": "C", "dropped": "R"}


def test_a_half_message_is_stored_before_the_business_write(outbox_settings: Callable[..., None]) -> None:
    with transaction.atomic():
        publish("orders", {}, key="early")
        assert decisions() == {"early": None}
        Order.objects.create(number="early")
    assert decisions() == {"early": "C"}


def test_savepoints_take_their_messages_with_them(path: str) -> None:
    with transaction.atomic():
        order("outer")
        with rolled_back():
            order("inner")
            with transaction.atomic():
                order("innermost")
        with transaction.atomic():
            order("second")
    if path == "two_phase":
        run_check_back()
        assert decisions() == {"outer": "C", "inner": "R", "innermost": "R", "second": "C"}
    else:
        assert decisions() == {"outer": "C", "second": "C"}
    assert set(Order.objects.values_list("number", flat=True)) == {"outer", "second"}


def test_an_error_out_of_commit_decides_nothing(path: str) -> None:
    Payment.objects.create(reference="taken")

    @transaction.atomic
    def pay_twice() -> None:
        Payment.objects.create(reference="taken")
        publish("payments", {}, key="taken")

    with pytest.raises(IntegrityError):
        pay_twice()
    if path == "two_phase":
        assert decisions() == {"taken": None}
        assert run_check_back().rolled_back == 1
        assert decisions() == {"taken": "R"}
    else:
        assert decisions() == {}


def test_using_names_the_transaction() -> None:
    with transaction.atomic(using="other"), transaction.atomic():
        with pytest.raises(TransactionUsageError, match=r"'other'.*using="):
            publish("orders", {})
        with rolled_back(using="other"):
            order("on-other", using="other")
        order("on-default", using="default")
    run_check_back()
    assert decisions() == {"on-other": "R", "on-default": "C"}


def test_another_kind_of_database_takes_the_two_phase_path() -> None:
    with transaction.atomic(using="lite"):
        order("lite", using="lite")
    with rolled_back(using="lite"):
        order("dropped", using="lite")
    run_check_back()
    assert decisions() == {"lite": "C", "dropped": "R"}


def test_manual_commit_mode_is_refused() -> None:
    transaction.set_autocommit(False)
    try:
        with pytest.raises(TransactionUsageError, match="manual-commit"):
            publish("orders", {}, at_once=True)
        with pytest.raises(TransactionUsageError, match="manual-commit"), transaction.atomic():
            publish("orders", {})
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)
    assert stored() == []


def test_publish_many_is_one_transaction_and_one_statement(path: str) -> None:
    with transaction.atomic():
        receipts = publish_many("orders", [{"n": 1}, {"n": 2}, {"n": 3}], key=lambda body: body["n"], tag="bulk")
    assert {receipt.transaction_id for receipt in receipts} == {receipts[0].message_id}
    assert decisions() == {"1": "C", "2": "C", "3": "C"}
    assert len(ledger_ids("default")) == (1 if path == "two_phase" else 0)
    assert publish_many("orders", [], at_once=True) == []


def test_an_unreachable_broker_rolls_back_within_the_deadline(
    databases: None, outbox_settings: Callable[..., None]
) -> None:
    outbox_settings(BROKER="broker", SEND_TIMEOUT_SECONDS=0.5)
    point_alias("broker", "postgresql://nobody@127.0.0.1:9/nothing")
    with pytest.raises(BrokerUnavailable, match="Nothing was published"), transaction.atomic():
        order("unsent")
    assert not Order.objects.exists()
    assert ledger_ids("default") == []


def test_a_tombstone_refuses_the_late_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    late = message("orders", {}, key="late")
    ledger.insert_tombstone(connections["default"], late.message_id, ledger_id=LedgerIdentity.objects.get().ledger_id)
    with transaction.atomic():
        with transaction.atomic():
            Order.objects.create(number="late")
            with pytest.raises(TransactionAlreadyRolledBack, match=str(late.message_id)):
                publish_messages([late])
    assert not Order.objects.exists()
    assert stored() == []


def test_a_message_of_a_transaction_that_is_over_is_not_sent_again() -> None:
    again = message("orders", {}, key="again")
    with rolled_back():
        publish_messages([again])
    with transaction.atomic():
        # The first attempt is undecided: the second one is the same transaction.
        publish_messages([again])
    assert decisions() == {"again": "C"}
    other = message("orders", {}, key="other")
    with rolled_back():
        publish_messages([other])
    get_broker().end(
        [EndTransaction(transaction_id=other.message_id, decision=Decision.ROLLBACK, producer_group="shop")]
    )
    for error, used in ((TransactionAlreadyRolledBack, again), (InvalidMessage, other)):
        with pytest.raises(error, match="new message"), transaction.atomic():
            publish_messages([used])
    assert decisions() == {"again": "C", "other": "R"}


def test_delay_and_deliver_at() -> None:
    with transaction.atomic():
        publish("reminders", {}, delay=60, key="later")
    with pytest.raises(UsageError, match="not both"):
        publish("reminders", {}, delay=1, deliver_at=timezone.now(), at_once=True)
    with pytest.raises(UsageError, match="negative"):
        publish("reminders", {}, delay=-1, at_once=True)
    with pytest.raises(MessageTypeMismatch, match="DELAY"):
        publish("orders", {}, delay=1, at_once=True)


def test_a_time_limit_is_stored_by_every_form_of_publish() -> None:
    @transactional_message("orders", body={}, timeout=timedelta(minutes=1), headers=lambda: {"a": "b"})
    def pay() -> None:
        pass

    with transaction.atomic():
        publish("orders", {}, timeout=60)
        publish_many("orders", [{}, {}], timeout=0.5)
        publish_messages([message("orders", {}, timeout=timedelta(microseconds=1))])
        publish("orders", {})
    pay()
    publish("orders", {}, timeout=3600, at_once=True)
    with psycopg.connect(alias_conninfo(get_settings().broker)) as connection:
        rows = connection.execute("SELECT headers FROM outbox.commit_log ORDER BY log_id").fetchall()
    texts = ["60", "0.5", "0.5", "0.000001", None, "60", "3600"]
    assert [headers and headers[TIMEOUT_HEADER] for (headers,) in rows] == texts
    assert rows[5][0]["a"] == "b"


def test_two_phase_needs_a_producer_group(outbox_settings: Callable[..., None]) -> None:
    with override_settings(OUTBOX={key: value for key, value in OUTBOX.items() if key != "PRODUCER_GROUP"}):
        with pytest.raises(ConfigurationError, match="PRODUCER_GROUP"), transaction.atomic():
            publish("orders", {})


def ledger_ids(alias: str) -> list[Any]:
    return list(LedgerEntry.objects.using(alias).values_list("transaction_id", flat=True))


# -- tables that no migration made ------------------------------------------------------------------


def test_publishing_without_the_ledgers_tables() -> None:
    with renamed("outbox_ledger_identity"):
        with pytest.raises(ConfigurationError, match=r"migrate --database=default.*Nothing was published"):
            with transaction.atomic():
                publish("orders", {})
    assert stored() == []


def test_consuming_without_the_inbox(no_subscribers: None) -> None:
    @subscriber("orders", group="needs-inbox")
    def handler(delivery: object) -> None:
        """Would need an inbox."""

    with renamed("outbox_inbox"), pytest.raises(ConfigurationError, match=r"'outbox_inbox' is missing on 'default'"):
        consumer_runtime()


def test_publishing_to_tables_newer_than_the_code() -> None:
    with broker_connection() as (connection, _):
        connection.execute("UPDATE outbox.schema_version SET minimum_code = 99")
        try:
            reset_broker()
            with pytest.raises(SchemaError, match="newer than this code"), transaction.atomic():
                publish("orders", {})
            with pytest.raises(CommandError, match="newer than this code"):
                call_command("migrate", database="broker", verbosity=0)
        finally:
            connection.execute("UPDATE outbox.schema_version SET minimum_code = 1")
            reset_broker()
    assert stored() == []
