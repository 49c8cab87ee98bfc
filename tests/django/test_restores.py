"""One of the two databases is restored to before the other: nothing is lost without a condition that names it.

A dump or a base backup; to the same or to another server; workers that continue, or stopped from the copy on; the
broker's database or the application's; both paths. On the atomic path the two are one database.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connections, transaction
from psycopg.conninfo import make_conninfo

from outbox.broker import embedded
from outbox.contrib.django import publish
from outbox.contrib.django.engine.broker import flush, reset_broker
from outbox.contrib.django.operations.installation import install_broker
from outbox.contrib.django.settings.conf import get_settings
from tests.django.conftest import point_alias
from tests.django.effects import usual as effects
from tests.django.processes import child
from tests.django.shop.models import Effect, Order
from tests.django.state import execute
from tests.restores import Servers, base_backup, dump, recreate, restore, restore_over
from tests.support import eventually

SETTINGS = {"max_connections": "60", "shared_buffers": "32MB"}
QUICK = {
    ("dump", "same", "running", "broker", "two_phase"),
}
# Each pair of two values is in one of these or of the quick ones; `make faults` runs the whole table.
SLOW = {
    ("dump", "same", "running", "application", "two_phase"),
    ("dump", "same", "stopped", "broker", "two_phase"),
    ("dump", "other", "stopped", "application", "two_phase"),
    ("base_backup", "other", "running", "application", "two_phase"),
    ("base_backup", "same", "stopped", "application", "two_phase"),
    ("base_backup", "other", "running", "broker", "two_phase"),
    ("dump", "other", "running", "both", "atomic"),
    ("base_backup", "same", "stopped", "both", "atomic"),
}
CELLS = [
    *itertools.product(
        ("dump", "base_backup"), ("same", "other"), ("running", "stopped"), ("broker", "application"), ("two_phase",)
    ),
    *itertools.product(("dump", "base_backup"), ("same", "other"), ("running", "stopped"), ("both",), ("atomic",)),
]


@dataclass
class Cell:
    """A shop with its workers, and the database of it that is restored."""

    copy: str
    server: str
    workers: str
    which: str
    path: str
    servers: Servers
    folder: Path
    stack: contextlib.ExitStack
    running: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    kept: Path = Path()

    @property
    def outbox(self) -> dict[str, Any]:
        return {"BROKER": "default"} if self.path == "atomic" else {}

    @property
    def url(self) -> str:
        """The database that is restored."""
        return make_conninfo(self.servers.url("restored"), dbname="shop")

    def start_workers(self) -> None:
        self.running = self.stack.enter_context(contextlib.ExitStack())
        for role in ("broker", "consumer"):
            self.running.enter_context(child(role, outbox=self.outbox, quiet=True))

    def order(self, numbers: range) -> None:
        for number in numbers:
            with transaction.atomic():
                Order.objects.create(number=f"n{number}")
                publish("orders", {"number": number}, key=f"n{number}")
        assert flush(within_seconds=30)

    def take_copy(self) -> None:
        self.kept = self.folder / "copy"
        if self.copy == "dump":
            dump(self.url, self.kept)
        else:
            base_backup(self.servers.url("restored"), self.kept)

    def restore(self) -> None:
        connections.close_all()
        reset_broker()
        if self.copy == "base_backup":
            put = self.servers.put_back if self.server == "same" else self.servers.replace
            put("restored", self.kept)
        elif self.server == "other":
            # The address leads to it when the dump is loaded: running workers would write into half of the tables.
            self.servers.replace("restored", load=self._load)
        elif self.workers == "running":
            restore_over(self.url, self.kept)
        else:
            recreate(self.url, self.kept)

    def _load(self, url: str) -> None:
        restore(embedded.create_database(url, "shop", template="template0"), self.kept)

    def command(self, *arguments: str) -> tuple[int, Any]:
        """Run an operator's command; returns its exit code and its JSON."""
        out, code = StringIO(), 0
        try:
            call_command(*arguments, "--json", stdout=out)
        except SystemExit as ended:
            code = int(str(ended.code))
        return code, json.loads(out.getvalue())

    def conditions(self) -> dict[str, dict[str, Any]]:
        """The conditions about restores, after a comparison."""
        self.command("outbox_audit", "compare")
        _, found = self.command("outbox_status")
        return {one["name"]: one for one in found["conditions"] if one["name"].startswith("lost_")}


@pytest.fixture
def cell(
    request: pytest.FixtureRequest,
    databases: None,
    no_subscribers: None,
    new_database: Callable[..., str],
    outbox_settings: Callable[..., None],
) -> Iterator[Cell]:
    """The shop, with the database that is to be restored on a server of its own."""
    # The subscribers of the worker processes, also for what this process compares.
    importlib.reload(effects)
    before = dict(connections["default"].settings_dict)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ob-", ignore_cleanup_errors=True)))
        folder.chmod(0o711)
        servers = Servers(folder, SETTINGS)
        stack.callback(servers.stop)
        servers.start("restored")
        copy, server, workers, which, path = request.param
        made = Cell(copy, server, workers, which, path, servers, folder, stack)
        url = embedded.create_database(servers.url("restored"), "shop")
        if made.which == "broker":
            point_alias("broker", url)
            point_alias("default", new_database())
        else:
            point_alias("default", url)
        if made.path == "atomic":
            outbox_settings(BROKER="default")
        reset_broker()
        call_command("migrate", database="default", run_syncdb=True, verbosity=0)
        if made.which != "application":
            install_broker(get_settings())
        try:
            with contextlib.ExitStack() as running:
                made.stack = running
                yield made
        finally:
            reset_broker()
            connections.close_all()
            for settings in (connections["default"].settings_dict, connections.settings["default"]):
                settings.update(before)


def _parameter(values: tuple[str, ...]) -> Any:
    marks = () if values in QUICK else pytest.mark.slow if values in SLOW else pytest.mark.soak
    return pytest.param(values, marks=marks, id="-".join(values))


def _effects() -> list[str]:
    return sorted(Effect.objects.filter(number__startswith="n").values_list("number", flat=True))


def _state() -> str:
    with connections[get_settings().broker].cursor() as cursor:
        cursor.execute(
            "SELECT (SELECT count(*) FROM outbox.consume_queue), (SELECT count(*) FROM outbox.consumer),"
            " (SELECT count(*) FROM outbox.op_log), (SELECT max(error) FROM outbox.failure)"
        )
        return f"effects {_effects()}; queued, consumers, decided, error: {cursor.fetchone()}"


def _names(*ranges: range) -> list[str]:
    return sorted(f"n{number}" for numbers in ranges for number in numbers)


BEFORE, LOST, AFTER = range(5), range(5, 12), range(12, 20)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("no_events")
@pytest.mark.parametrize("cell", [_parameter(one) for one in CELLS], indirect=True)
def test_nothing_is_lost_without_a_condition_that_names_it(cell: Cell, tmp_path: Path) -> None:
    cell.start_workers()
    cell.order(BEFORE)
    eventually(lambda: _effects() == _names(BEFORE), within_seconds=90, what=_state)
    assert cell.conditions() == {}
    cell.take_copy()
    if cell.workers == "stopped":
        cell.running.close()
    cell.order(LOST)
    if cell.workers == "running":
        eventually(lambda: _effects() == _names(BEFORE, LOST), within_seconds=60)
    published = _transactions() if cell.path == "two_phase" else {}

    cell.restore()
    if cell.workers == "stopped":
        cell.start_workers()
    cell.order(AFTER)
    eventually(lambda: set(_names(AFTER)) <= set(_effects()), within_seconds=90, what=lambda: str(_effects()))

    found = cell.conditions()
    if cell.path == "atomic":
        # Orders, messages and effects are one database: they are all as of the copy.
        assert found == {}
        assert _effects() == sorted(Order.objects.values_list("number", flat=True)) == _names(BEFORE, AFTER)
    elif cell.which == "broker":
        _assert_messages_are_named(cell, found, published, tmp_path)
    else:
        _assert_commits_and_effects_are_named(cell, found, published)


def _transactions() -> dict[str, str]:
    """Every committed row of the ledger, and the key of its message."""
    return dict(
        execute("SELECT transaction_id::text, topic_id || ' ' || key FROM outbox.commit_log WHERE half", alias="broker")
    )


def _ids(condition: dict[str, Any]) -> set[str]:
    return {one for fact in condition["evidence"] for one in fact["ids"].split(", ")}


def _assert_messages_are_named(
    cell: Cell, found: dict[str, dict[str, Any]], published: dict[str, str], tmp_path: Path
) -> None:
    """The broker has forgotten the messages between copy and restore: the ledger names their transactions."""
    gone = set(published) - set(_transactions())
    assert {published[one].partition(" ")[2] for one in gone} == set(_names(LOST))
    assert list(found) == ["lost_messages"]
    assert found["lost_messages"]["severity"] == "critical"
    assert _ids(found["lost_messages"]) == gone
    assert found["lost_messages"]["count"] == len(gone)
    if cell.workers == "stopped":
        assert _effects() == _names(BEFORE, AFTER)
        from tests.django.repairs import Repair, lost

        # The output of `outbox-reconcile plan` for rows without a message.
        repair = Repair(tmp_path)
        outcomes = repair.outcomes(*(lost(name) for name in _names(LOST)))
        assert outcomes == ["done"] * len(LOST)
    eventually(lambda: _effects() == _names(BEFORE, LOST, AFTER), within_seconds=60)
    assert _effects() == sorted(Order.objects.values_list("number", flat=True))
    code, answer = cell.command("outbox_audit", "settle", "--no-input")
    assert (code, answer["after"]["settled"]) == (0, len(gone))
    assert cell.conditions() == {}


def _assert_commits_and_effects_are_named(
    cell: Cell, found: dict[str, dict[str, Any]], published: dict[str, str]
) -> None:
    """The application has forgotten orders that it had published, and what its handlers had done."""
    kept = {one for (one,) in execute("SELECT transaction_id::text FROM outbox_ledger WHERE state = 'C'")}
    gone = set(published) - kept
    assert {published[one].partition(" ")[2] for one in gone} == set(_names(LOST))
    assert _ids(found["lost_commits"]) == gone
    assert sorted(Order.objects.values_list("number", flat=True)) == _names(BEFORE, AFTER)
    if cell.workers == "running":
        assert _effects() == _names(BEFORE, AFTER)
        by_topic = {fact["topic"]: fact for fact in found["lost_effects"]["evidence"]}
        assert by_topic["orders"]["missing"] == len(LOST)
        assert set(by_topic["orders"]["ids"].split(", ")) <= gone
        for fact in by_topic.values():
            program, *arguments = fact["command"].split()
            assert program == "manage.py"
            cell.command(*arguments)
    else:
        assert "lost_effects" not in found
    # The broker still has these messages; the condition names that their orders are gone.
    eventually(lambda: _effects() == _names(BEFORE, LOST, AFTER), within_seconds=60)
    eventually(lambda: "lost_effects" not in cell.conditions(), within_seconds=60)
    code, answer = cell.command("outbox_audit", "settle", "--no-input")
    assert (code, answer["after"]["settled"]) == (0, len(gone))
    assert cell.conditions() == {}
