"""What outbox uses of Django beyond its documentation behaves as it was read (Django 5.2.19).

And no other module uses a private name of a library.
"""

from __future__ import annotations

import ast
import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.db import connections, transaction
from django.db.backends.signals import connection_created
from django.db.transaction import TransactionManagementError
from django.test import TestCase, override_settings

import outbox
from outbox.contrib.django.database.django_internals import (
    CONNECT,
    WatchedBlocks,
    is_test_case,
    rollback_cause,
    running_loop,
    running_tests,
    set_rollback_cause,
    settings_read,
)
from outbox.contrib.django.publishing.publish import initialized_connections
from outbox.errors import TransactionUsageError

PACKAGE = Path(outbox.__file__).parent
# Private by their underscore, but documented: by Django, Python and confluent-kafka.
DOCUMENTED = {"_meta", "_base_manager", "_state", "_exit", "_getframe", "_MSG_TIMED_OUT", "_FATAL"}
# The modules that may use private names, by their path below outbox/.
PRIVATE = {
    "contrib/django/database/django_internals.py": {"_TestState", "_connections", "_get_running_loop", "_storage"},
    "broker/database/psycopg_internals.py": {"_get_tx_start_command"},
    # The only module that imports RocketMQ's library.
    "rocketmq/client.py": {
        *("_init_settings_event", "_receive", "_receive_req", "_retrieve_topic_route_data"),
        "_ClientRouteManager__topic_route_cache",
    },
    # pytest has no public way to ask which fixtures a test uses.
    "pytest_plugin/__init__.py": {"_fixtureinfo"},
}


@pytest.mark.usefixtures("application")
def test_a_connection_keeps_the_outermost_block_first() -> None:
    connection = connections["default"]
    begun: list[int] = []
    with transaction.atomic():
        watched = WatchedBlocks(connection, lambda: begun.append(len(connection.atomic_blocks)))
        assert len(watched) == 1
    before, connection.atomic_blocks = connection.atomic_blocks, WatchedBlocks(connection, lambda: begun.append(1))
    try:
        for _ in range(2):
            with transaction.atomic(), transaction.atomic():
                assert len(connection.atomic_blocks) == 2
    finally:
        connection.atomic_blocks = before
    assert begun == [1, 1], "once for each outermost block"


@pytest.mark.usefixtures("application")
def test_the_end_of_a_block_that_is_not_open_ends_no_other_block() -> None:
    connection, other = connections["default"], transaction.atomic()
    connection.ensure_connection()
    with transaction.atomic():
        open_blocks = list(connection.atomic_blocks)
        with pytest.raises(TransactionUsageError):
            other.__exit__(None, None, None)
        assert connection.in_atomic_block
        assert list(connection.atomic_blocks) == open_blocks
    assert not connection.in_atomic_block


@pytest.mark.usefixtures("application")
def test_the_block_of_a_test_case_is_known() -> None:
    seen: list[bool] = []

    class Case(TestCase):
        databases = {"default"}  # noqa: RUF012

        def runTest(self) -> None:
            with transaction.atomic():
                seen.extend(map(is_test_case, connections["default"].atomic_blocks))

    Case.setUpClass()
    try:
        Case().debug()
    finally:
        Case.tearDownClass()
        Case.doClassCleanups()
    # The block of the class, that of the test, and the test's own.
    assert seen == [True, True, False]


@pytest.mark.usefixtures("application")
def test_the_connections_of_a_thread_are_known() -> None:
    for alias in connections:
        connections[alias].ensure_connection()

    def same() -> bool:
        return {id(one) for one in initialized_connections()} == {id(one) for one in connections.all(True)}

    def in_a_new_thread() -> tuple[int, bool, int]:
        before = len(initialized_connections())
        own = connections["default"]
        return before, same(), len([one for one in initialized_connections() if one is own])

    async def in_a_coroutine() -> bool:
        return same()

    assert same() and len(initialized_connections()) == len(list(connections))
    assert asyncio.run(in_a_coroutine()), "a coroutine has connections of its own"
    assert same(), "what asgiref keeps for coroutines is no connection"
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(in_a_new_thread).result() == (0, True, 1)


@pytest.mark.usefixtures("application")
def test_django_names_the_cause_of_a_rollback() -> None:
    connection, first, second = connections["default"], ValueError("first"), ValueError("second")
    with transaction.atomic():
        with pytest.raises(ValueError, match="first"), transaction.mark_for_rollback_on_error():
            raise first
        assert rollback_cause(connection) is first
        set_rollback_cause(connection, second)
        with pytest.raises(TransactionManagementError) as raised, connection.cursor() as cursor:
            cursor.execute("SELECT 1")
        assert raised.value.__cause__ is second
    with transaction.atomic():
        assert rollback_cause(connection) is None, "the list of blocks has forgotten the cause"


@pytest.mark.usefixtures("application")
def test_a_connection_is_opened_in_the_known_function() -> None:
    connection, found = connections["default"], []

    def receive(**_: Any) -> None:
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            found.append(frame.f_code)

    connection.close()
    connection_created.connect(receive)
    try:
        connection.ensure_connection()
    finally:
        connection_created.disconnect(receive)
        connection.close()
    assert CONNECT in found


def test_the_settings_that_were_read_are_forgotten_when_one_changes() -> None:
    value = settings.OUTBOX
    assert settings_read["OUTBOX"] is value
    with override_settings(DEBUG=True):
        assert "OUTBOX" not in settings_read
        assert settings.OUTBOX is value and settings_read["OUTBOX"] is value
    assert "OUTBOX" not in settings_read
    with override_settings(OUTBOX={}):
        assert settings.OUTBOX == {} and settings_read["OUTBOX"] is settings.OUTBOX
        settings.OUTBOX = value
        assert "OUTBOX" not in settings_read
        del settings.OUTBOX
        assert "OUTBOX" not in settings_read


def test_a_coroutine_is_known() -> None:
    async def is_known() -> bool:
        return running_loop() is asyncio.get_running_loop()

    assert asyncio.run(is_known()) and running_loop() is None


def test_a_test_run_is_known() -> None:
    assert running_tests()


def test_no_other_module_uses_private_names() -> None:
    """A private name that the package does not define itself belongs to a library."""
    own, used = set(DOCUMENTED), dict[str, set[str]]()
    without_underscore = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "rollback_exc" in text:
            without_underscore.add(path.name)
        names = used[path.relative_to(PACKAGE).as_posix()] = set()
        for node in ast.walk(ast.parse(text)):
            own.update(_defined(node))
            names.update(_used(node))
    assert {path: names - own for path, names in used.items() if names - own} == {
        path: names for path, names in PRIVATE.items() if (PACKAGE / path).is_file()
    }
    assert without_underscore == {"django_internals.py"}


def _defined(node: ast.AST) -> list[str]:
    """The names that a node defines: functions, classes, variables and attributes."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        return [node.id if isinstance(node, ast.Name) else node.attr]
    return []


def _used(node: ast.AST) -> list[str]:
    """The private names of attributes, imported names and names given to getattr that a node uses."""
    names = []
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        names = [node.attr]
    elif isinstance(node, ast.ImportFrom):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
        names = [str(part.value) for part in node.args[1:2] if isinstance(part, ast.Constant)]
    return [name for name in names if name.startswith("_") and not name.startswith("__")]
