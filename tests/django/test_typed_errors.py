"""A refusal of the application's database is an error of publish that names the message and the next step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager

import pytest
from django.db import Error, connections, transaction

from outbox.contrib.django import message, publish, publish_messages, transactional_message
from outbox.contrib.django.ledger.ledger_checker import open_connection
from outbox.contrib.django.settings.conf import get_settings
from outbox.errors import SendFailed
from tests.django.shop.models import Order
from tests.django.state import decisions, execute


@transactional_message("orders", key="decorated", body={})
def decorated() -> None: ...


@transactional_message("orders", key="decorated", body=lambda result: {})
def decorated_late() -> None: ...


CALLS: dict[str, Callable[[], object]] = {
    "publish": lambda: publish("orders", {}),
    "publish_messages": lambda: publish_messages([message("orders", {})]),
    "decorated": decorated,
    "decorated_late": decorated_late,
}


@contextmanager
def killed() -> Iterator[None]:
    """The server ends this session."""
    pid = connections["default"].connection.info.backend_pid
    with closing(open_connection("default")) as other, other.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
    yield


@contextmanager
def read_only() -> Iterator[None]:
    """As on a replica, or where an operator has set it."""
    execute("SET LOCAL transaction_read_only = on")
    yield


@contextmanager
def without_rights() -> Iterator[None]:
    """A role that may do nothing."""
    with closing(open_connection("default")) as other, other.cursor() as cursor:
        cursor.execute("CREATE ROLE outbox_nobody")
        try:
            execute("SET LOCAL ROLE outbox_nobody")
            yield
        finally:
            cursor.execute("DROP ROLE outbox_nobody")


@contextmanager
def raised_by_a_trigger(state: str) -> Iterator[None]:
    """The server raises what it would raise with a full disk, or for a conflict with another transaction."""
    table = "outbox.commit_log" if get_settings().broker == "default" else "outbox_ledger"
    with closing(open_connection("default")) as other, other.cursor() as cursor:
        cursor.execute(
            f"CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN RAISE 'as if' USING ERRCODE = '{state}'; END $$;"
            f"CREATE TRIGGER refuse BEFORE INSERT ON {table} FOR EACH STATEMENT EXECUTE FUNCTION refuse()"
        )
        try:
            yield
        finally:
            connections["default"].close()
            cursor.execute("DROP FUNCTION refuse() CASCADE")


FAULTS: dict[str, tuple[Callable[[], AbstractContextManager[None]], str]] = {
    "killed": (killed, "the connection (broke|was ended)"),
    "read-only": (read_only, "the database is read-only"),
    "rights": (without_rights, "the role lacks a right"),
    "disk": (lambda: raised_by_a_trigger("53100"), "the server is short of disk"),
    "serialisation": (lambda: raised_by_a_trigger("40001"), "another transaction conflicted with this transaction"),
    "other": (lambda: raised_by_a_trigger("22000"), "the database refused the statement"),
}


def work(fault: Callable[[], AbstractContextManager[None]], call: str) -> None:
    with transaction.atomic():
        Order.objects.create(number="never")
        with fault():
            CALLS[call]()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("call", CALLS)
def test_no_error_of_the_driver_reaches_the_caller(call: str) -> None:
    publish("orders", {}, key="warm-up", at_once=True)
    with transaction.atomic():
        publish("orders", {}, key="warm-up of the path")
    for name, (fault, said) in FAULTS.items():
        if call.startswith("decorated") and name == "killed":
            # A decorated function opens a block of its own first; that statement of Django's fails.
            continue
        text = f"(?s)was not done: the database 'default' reported an error, because {said}.*rolled back"
        with pytest.raises(SendFailed, match=text) as got:
            work(fault, call)
        assert isinstance(got.value.__cause__, Error), name
        if call.startswith("publish"):
            assert "'orders'" in str(got.value), name
        connections["default"].close()
        assert not Order.objects.exists(), name
        committed = {key for key, state in decisions().items() if state == "C"}
        assert committed == {"warm-up", "warm-up of the path"}, name


@pytest.mark.usefixtures("empty_log")
def test_a_database_that_has_nothing_to_do_with_the_message_is_not_connected() -> None:
    other = connections["other"]
    other.close()
    right, other.settings_dict["PORT"] = other.settings_dict["PORT"], "9"
    try:
        publish("orders", {}, key="sent", using="other", at_once=True)
    finally:
        other.settings_dict["PORT"] = right
    assert decisions() == {"sent": "C"}


@pytest.mark.usefixtures("empty_log")
def test_a_locked_sqlite_file_is_named() -> None:
    lite = connections["lite"]
    lite.close()
    lite.settings_dict["OPTIONS"]["timeout"] = 0.01
    try:
        with closing(open_connection("lite")) as other:
            other.ensure_connection()
            other.connection.execute("BEGIN IMMEDIATE")
            with (
                pytest.raises(SendFailed, match="'lite' reported an error, because another transaction conflicted"),
                transaction.atomic(using="lite"),
            ):
                publish("orders", {}, using="lite")
    finally:
        lite.close()
        lite.settings_dict["OPTIONS"]["timeout"] = 20
