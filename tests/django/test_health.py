"""Health of broker and workers, by command, view, file and port."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.auth.models import User
from django.db import IntegrityError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created
from django.test import Client

from outbox import hooks
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.leading import Sequencer
from outbox.broker.operations import rules
from outbox.broker.operations.conditions import Condition, Severity
from outbox.broker.sequencer.leader_lease import LeaderLease
from outbox.contrib.django import publish
from outbox.contrib.django.database.aliases import broker_database
from outbox.contrib.django.engine.broker import flush, reset_broker
from outbox.contrib.django.operations.watching import look, probe
from outbox.contrib.django.worker import periodic, probes, workers
from outbox.contrib.django.worker.periodic import passes
from outbox.contrib.django.worker.roles import FIRST_PROCESS, prepare_health_files
from outbox.contrib.django.worker.workers import run_check_role, run_pass, wait_until_prepared
from outbox.errors import BrokerError, BrokerUnavailable
from outbox.utils import heartbeat
from outbox.utils.periodic import PeriodicPass
from tests.broker.support import wire
from tests.django.broker_world import NOWHERE
from tests.django.conftest import point_alias
from tests.django.entry_points import say
from tests.django.operators import client_of, make_user
from tests.django.processes import child
from tests.django.state import execute, incidents, rolled_back
from tests.django.support import broker_sql, ended
from tests.part_apps import has
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("databases", "no_subscribers")

VIEWS = ["/outbox/status/", *(["/outbox/metrics/"] if has("prometheus") else [])]


@pytest.fixture
def led(databases: None) -> None:
    """A leader ticks."""
    with closing(broker_database().connect()) as connection:
        assert LeaderLease("outbox", uuid4(), term_seconds=600).acquire_or_renew(connection) == 0.0


def health(*arguments: str) -> tuple[int, str]:
    asked = () if {"--live", "--ready"} & set(arguments) else ("--probe",)
    code, said = ended("outbox_status", *asked, *arguments)
    return code, said.strip()


def test_the_probe_by_command(led: None) -> None:
    assert health() == (0, "healthy")
    publish("orders", {}, at_once=True)
    flush(within_seconds=5)
    with closing(broker_database().connect()) as connection:
        connection.execute("UPDATE outbox.op_log SET decided_at = decided_at - interval '30 seconds'")
        code, text = health()
        assert code == 1 and "rolled back or due have waited" in text and "30 s" in text
        connection.execute("UPDATE outbox.leader_lease SET expires_at = now() - interval '1 minute'")
        [evidence] = conditions()["no_sequencer"].evidence
        assert evidence["not_queued_messages"] == 1, "no group has it in its lag"
    code, text = health("--json")
    assert code == 1 and "No process runs the sequencer" in json.loads(text)["problems"][0]
    point_alias("broker", NOWHERE)
    code, text = health()
    assert code == 1 and "cannot be reached" in text


@pytest.mark.timeout(60)
@pytest.mark.parametrize("table", ["leader_lease", "op_log"])
def test_the_probe_names_a_lock_instead_of_waiting_for_it(led: None, table: str) -> None:
    with closing(broker_database().connect()) as connection, connection.transaction():
        connection.execute(f"LOCK TABLE outbox.{table}".encode())
        assert [one.name for one in probe().conditions] == ["lock_held"]
        code, text = health()
        assert code == 1 and "A session holds a lock" in text
        answer = Client().get("/outbox/health/")
        assert (answer.status_code, answer.json()) == (503, {"healthy": False})


def test_the_probe_costs_two_look_ups_in_a_transaction(led: None) -> None:
    with closing(broker_database().connect()) as connection, wire(connection) as sent:
        assert rules.probe(Executor(connection, "outbox")).is_healthy
    assert sent.round_trips == 5


def test_views(led: None, outbox_settings: Callable[..., None]) -> None:
    outbox_settings(STATUS_TOKEN="s3cret")
    client, bearer = Client(), {"Authorization": "Bearer s3cret"}
    assert client.get("/outbox/health/").json() == {"healthy": True}
    for page in VIEWS:
        assert client.get(page).status_code == 403
        assert client.get(page, headers={"Authorization": "Bearer guessed"}).status_code == 403
        assert client.post(page, headers=bearer).status_code == 405
        assert client.get(page, headers=bearer).status_code == 200
    assert client.get("/outbox/status/", headers=bearer).json()["severity"] == "ok"
    with closing(broker_database().connect()) as connection:
        connection.execute("UPDATE outbox.leader_lease SET expires_at = now() - interval '1 minute'")
    response = client.get("/outbox/health/")
    assert (response.status_code, response.json()) == (503, {"healthy": False})
    response = client.get("/outbox/status/", headers=bearer)
    assert (response.status_code, response.json()["conditions"][0]["name"]) == (503, "no_sequencer")
    outbox_settings(STATUS_TOKEN=None)
    assert client.get("/outbox/status/", headers={"Authorization": "Bearer "}).status_code == 403


def test_staff_without_the_permission_read_neither_status_nor_metrics(
    led: None, outbox_settings: Callable[..., None]
) -> None:  # fmt: skip
    outbox_settings(STATUS_TOKEN="s3cret")
    try:
        users = [
            (make_user(), 403),
            (make_user("act", "view_bodies"), 403),
            (make_user("view_operations", staff=False), 403),
            (make_user("view_operations"), 200),
        ]
        for user, status in users:
            client = client_of(user)
            for page in VIEWS:
                answer = client.get(page)
                assert answer.status_code == status, (page, status)
                assert status == 200 or b"outbox.view_operations" in answer.content
                assert client.get(page, headers={"Authorization": "Bearer s3cret"}).status_code == 200
            assert ("problems" in client.get("/outbox/health/").json()) is (status == 200)
    finally:
        User.objects.all().delete()


@pytest.fixture
def directory(tmp_path: Path, outbox_settings: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the worker's processes leave signs of life; the port is any that is free."""
    monkeypatch.setattr(heartbeat, "_is_reached", True)
    outbox_settings(HEALTH_DIRECTORY=str(tmp_path / "signs"), HEALTH_ADDRESS="127.0.0.1:0")
    return tmp_path / "signs"


def beat(monkeypatch: pytest.MonkeyPatch, left: dict[str, dict[str, str]], name: str, *, ready: bool) -> None:
    """As the process of that name does."""
    monkeypatch.setattr(heartbeat, "_last", (0.0, not ready))
    monkeypatch.setenv(heartbeat.VARIABLE, left[name][heartbeat.VARIABLE])
    heartbeat.beat(ready=ready)


def test_signs_of_life(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert probes.live().problems == ["no worker has started on this machine"]
    left = prepare_health_files(["broker", "consumer-1"])
    assert probes.live().is_healthy
    assert probes.ready().problems == [
        "broker.heartbeat waits for the broker",
        "consumer-1.heartbeat waits for the broker",
    ]
    for name in left:
        beat(monkeypatch, left, name, ready=True)
    assert probes.ready().is_healthy and health("--ready") == (0, "healthy")
    beat(monkeypatch, left, "broker", ready=False)
    assert probes.live().is_healthy and not probes.ready().is_healthy
    os.utime(directory / "consumer-1.heartbeat", (time.time() - 100, time.time() - 100))
    assert [problem[:10] for problem in probes.live().problems] == ["consumer-1"]
    assert health("--live")[0] == 1
    prepare_health_files(["broker"])
    assert probes.live().is_healthy, "the one that is not expected any more is forgotten"


def test_a_worker_that_has_ended_is_not_live(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its heartbeats are recent for 30 s more."""
    left = prepare_health_files(["broker"])
    beat(monkeypatch, left, "broker", ready=True)
    code = "from outbox.utils.process_identity import process_identity; print(process_identity(), end='')"
    ended_process = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    (directory / FIRST_PROCESS).write_text(ended_process)
    assert probes.live().problems == ["the worker on this machine has ended"]
    assert health("--ready") == (1, "the worker on this machine has ended")
    prepare_health_files(["broker"])
    assert probes.live().is_healthy


@pytest.mark.parametrize("name", ["check_back", "conditions"])
def test_a_worker_whose_pooler_is_down_is_not_ready(
    name: str, databases: None, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop of its broker process goes on: it has the direct connection of LISTEN_URL."""
    if name == "conditions":
        # As without PRODUCER_GROUP.
        monkeypatch.setattr(periodic, "is_my_turn", lambda *_, **__: True)
    left = prepare_health_files(["broker"])
    [item] = [one for one in passes() if one.name == name]

    def is_ready() -> bool:
        run_pass(item)
        beat(monkeypatch, left, "broker", ready=True)
        return probes.ready().is_healthy

    assert is_ready()
    with monkeypatch.context() as patch:
        patch.setattr(BrokerDatabase, "open", refusing_the_pooler)
        reset_broker()
        assert not is_ready() and probes.live().is_healthy
    assert is_ready()


def refusing_the_pooler(*_: object, **__: object) -> None:
    raise BrokerUnavailable("the pooler does not answer")


def test_a_resynchronisation_is_not_taken_for_a_hung_loop(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = prepare_health_files(["broker"])
    beat(monkeypatch, left, "broker", ready=True)
    with closing(broker_database().connect()) as connection:
        connection.execute("UPDATE outbox.broker SET system_identifier = '1'")
        Sequencer(broker_database(), uuid4()).run_once(connection)
    assert (directory / "broker.heartbeat").stat().st_mtime > time.time() + 600
    beat(monkeypatch, left, "broker", ready=True)
    assert (directory / "broker.heartbeat").stat().st_mtime < time.time() + 600


seen: list[float] = []


def step() -> dict[str, int]:
    """Note how long the heartbeat of this process counts from now on."""
    seen.append(Path(os.environ[heartbeat.VARIABLE]).stat().st_mtime - time.time())
    return {}


@pytest.mark.parametrize("loop", [run_check_role, wait_until_prepared])
def test_a_long_step_is_not_taken_for_a_hung_loop(
    directory: Path, monkeypatch: pytest.MonkeyPatch, loop: Callable[[threading.Event], None]
) -> None:
    seen.clear()
    monkeypatch.setattr(hooks, "preparations", {"a step": f"{__name__}.step"})
    beat(monkeypatch, prepare_health_files(["check"]), "check", ready=True)
    stop = threading.Event()

    def last() -> dict[str, int]:
        stop.set()
        return step()

    passed = [PeriodicPass(name=one.__name__, interval_seconds=600, run=one) for one in (step, last)]
    monkeypatch.setattr(workers, "passes", lambda: passed)
    loop(stop)
    assert seen and min(seen) > 600


def fetch(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_the_port(directory: Path, monkeypatch: pytest.MonkeyPatch, led: None) -> None:
    left = prepare_health_files(["broker"])
    with probes.served() as address:
        assert address is not None
        port = int(address[1])
        assert fetch(port, "/live")[0] == 200
        assert fetch(port, "/ready")[0] == 503
        beat(monkeypatch, left, "broker", ready=True)
        assert fetch(port, "/ready") == (200, '{"healthy": true, "problems": []}')
        assert fetch(port, "/secrets") == (404, "there are /live /ready\n")


def served_by_a_part() -> tuple[str, bytes]:
    """What a worker answers for a part, with a connection of Django's."""
    return "text/plain", str(execute("SELECT current_database()")[0][0]).encode()


def test_the_port_leaves_no_connection_open(directory: Path, monkeypatch: pytest.MonkeyPatch, led: None) -> None:
    monkeypatch.setitem(hooks.served, "/name", f"{__name__}.served_by_a_part")
    opened = []

    def note(connection: BaseDatabaseWrapper, **_: object) -> None:
        opened.append(connection)

    prepare_health_files(["broker"])
    with probes.served() as address, connected(note):
        assert address is not None
        assert fetch(int(address[1]), "/name") == (200, connections["default"].settings_dict["NAME"])
    assert opened and all(connection.connection is None for connection in opened)


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as tried:
        tried.bind(("::1", 0))
        return True
    return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")
@pytest.mark.parametrize(("host", "callers"), [("[::1]", ["[::1]"]), ("[::]", ["[::1]", "127.0.0.1"])])
def test_the_port_of_ipv6(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    outbox_settings: Callable[..., None],
    host: str,
    callers: list[str],
) -> None:
    monkeypatch.setitem(hooks.served, "/name", f"{__name__}.served_by_a_part")
    outbox_settings(HEALTH_ADDRESS=f"{host}:0", STATUS_TOKEN=None)
    with probes.served() as address:
        assert address is not None
        assert [fetch(int(address[1]), "/name", caller)[0] for caller in callers] == [200] * len(callers)


@contextmanager
def connected(receiver: Callable[..., None]) -> Iterator[None]:
    connection_created.connect(receiver)
    try:
        yield
    finally:
        connection_created.disconnect(receiver)


# -- processes that run and fail --------------------------------------------------------------------


@contextlib.contextmanager
def refusing(table: str) -> Iterator[None]:
    """Every row that is written to a table of the broker is refused."""
    broker_sql(f"ALTER TABLE outbox.{table} ADD CONSTRAINT refuses CHECK (false) NOT VALID")
    yield
    broker_sql(f"ALTER TABLE outbox.{table} DROP CONSTRAINT refuses")


def conditions() -> dict[str, Condition]:
    return {one.name: one for one in look().verdict.conditions}


def failing() -> list[tuple[Any, Any]]:
    """The failing parts, and their errors."""
    found = conditions().get("process_failing")
    return [] if found is None else [(fact["failing"], fact["error"]) for fact in found.evidence]


def wait_until_named(part: str, error: str) -> Condition:
    def is_named() -> bool:
        return any(what == part and error in str(said) for what, said in failing())

    eventually(is_named, what=lambda: str(look()))
    return conditions()["process_failing"]


@pytest.mark.slow
def test_a_leader_whose_ticks_fail(databases: None) -> None:
    """It holds the lease at times: with and without it no condition says that a worker is missing."""
    broker_sql("ALTER FUNCTION outbox.make_tick RENAME TO away")
    with child("broker", quiet=True) as process:
        named = wait_until_named("sequencing", "function outbox.make_tick")
        assert named.severity is Severity.CRITICAL
        assert str(process.pid) in str(named.evidence[0]["process"])
        broker_sql("UPDATE outbox.leader_lease SET expires_at = '-infinity'")
        assert "no_sequencer" not in conditions()
        _, said = say("outbox_status")
        assert "process_failing" in said and "Start a worker" not in said
        broker_sql("ALTER FUNCTION outbox.away RENAME TO make_tick")
        eventually(lambda: conditions() == {}, what=lambda: str(look()))
    assert [kind for kind, _ in incidents()] == ["process_failed"]


@pytest.mark.slow
def test_a_leader_whose_lease_is_refused(databases: None) -> None:
    """It never leads, and the lease names no owner."""
    with refusing("leader_lease"), child("broker", quiet=True):
        wait_until_named("sequencing", "leader_lease")
        assert "no_sequencer" not in conditions()


def test_a_consumer_that_cannot_register(databases: None) -> None:
    with refusing("consumer_group"), child("consumer", quiet=True) as process:
        assert process.wait(60) != 0
        wait_until_named("consuming of effects", "refuses")


@pytest.mark.slow
def test_a_consumer_that_cannot_keep_its_leases(databases: None) -> None:
    with child("consumer", quiet=True):
        eventually(lambda: broker_sql("SELECT 1 FROM outbox.consumer"))
    eventually(lambda: not broker_sql("SELECT 1 FROM outbox.consumer"))
    # The grace of an ordinary restart is over.
    broker_sql("UPDATE outbox.queue_lease SET expires_at = expires_at - interval '1 minute'")
    assert "no_worker" in conditions()
    with refusing("consumer"), child("consumer", quiet=True):
        wait_until_named("keeping the leases of effects", "refuses")
        assert "no_worker" not in conditions()


def failed_check_back() -> PeriodicPass:
    """The pass of check-back, after it has failed once in this process."""
    [check_back] = [one for one in passes() if one.name == "check_back"]
    with rolled_back():
        publish("orders", {}, key="half")
    flush(within_seconds=5)
    with refusing("pending_check"):
        run_pass(check_back)
        assert failing()[0][0] == "the pass of check_back, shop"
    return check_back


def test_a_pass_that_fails(databases: None) -> None:
    run_pass(failed_check_back())
    assert failing() == []


def test_a_pass_of_a_process_that_has_ended_does_not_fail(databases: None) -> None:
    """As after a release that mends the pass: the condition would hold for 25 minutes more."""
    failed_check_back()
    stop = threading.Event()
    stop.set()
    run_check_role(stop)
    assert failing() == []


def age_notes(seconds: float) -> None:
    """As if no note had been stored or refreshed for this time."""
    broker_sql(f"UPDATE outbox.incident SET at = at - interval '{seconds} seconds'")
    for note in periodic._notes.values():
        note._stored_at -= seconds
        note._inserted_at -= seconds


def test_the_note_of_a_pass_counts_while_its_process_runs(databases: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The role check refreshes it while only other passes run."""
    check_back = failed_check_back()
    stop = threading.Event()

    def run() -> dict[str, int]:
        stop.set()
        return {}

    other = PeriodicPass(name="other", interval_seconds=600, run=run)
    monkeypatch.setattr(workers, "passes", lambda: [other])
    monkeypatch.setattr(workers, "end_notes", lambda: None)
    [fact] = conditions()["process_failing"].evidence
    assert fact["process"] == f"{os.getpid()} on {socket.gethostname()}"
    for _ in range(3):
        age_notes(80)
        assert len(failing()) == 1
        stop.clear()
        run_check_role(stop)
    age_notes(100)
    assert failing() == [], "the process has died"
    periodic.keep_notes()
    assert len(failing()) == 1
    run_pass(check_back)
    periodic.keep_notes()
    assert failing() == [] and [kind for kind, _ in incidents()] == ["process_failed"]


def test_a_login_that_may_not_change_its_note_adds_another_when_it_ends(databases: None) -> None:
    broker_sql(
        "CREATE FUNCTION outbox.refuse() RETURNS trigger LANGUAGE plpgsql"
        " AS $$ BEGIN RAISE insufficient_privilege; END $$"
    )
    broker_sql(
        "CREATE TRIGGER refuses BEFORE UPDATE ON outbox.incident FOR EACH ROW WHEN (new.at >= now())"
        " EXECUTE FUNCTION outbox.refuse()"
    )
    failed_check_back()
    for seconds, notes in ((60, 1), (25, 1), (10, 2)):
        age_notes(seconds)
        periodic.keep_notes()
        assert len(incidents()) == notes and len(failing()) == 1, seconds
    age_notes(100)
    assert failing() == [], "the process has ended, and could not say so"


def test_the_note_of_a_task_counts_until_beat_starts_the_next(databases: None) -> None:
    [check_back] = [one for one in periodic.tasks() if one.name == "check_back"]
    with rolled_back():
        publish("orders", {}, key="half")
    flush(within_seconds=5)
    with refusing("pending_check"), pytest.raises(BrokerError):
        check_back.run()
    age_notes(1000)
    assert [what for what, _ in failing()] == ["the task of check_back, shop"]
    check_back.run()
    assert failing() == []


def test_a_process_that_publishes(path: str) -> None:
    """The third refusal in a row is named; the next success ends it."""
    with refusing("commit_log"):
        for number in range(3):
            assert failing() == []
            with pytest.raises((BrokerError, IntegrityError)), transaction.atomic():
                publish("orders", {}, key=str(number))
        assert [what for what, _ in failing()] == ["publishing"]
    with transaction.atomic():
        publish("orders", {}, key="again")
    assert failing() == []


@pytest.mark.slow
def test_a_database_that_is_away_is_no_failure_of_a_process(databases: None) -> None:
    with child("broker", quiet=True):
        eventually(lambda: "no_sequencer" not in conditions())
        broker_sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        publish("orders", {}, key="one", at_once=True)
        eventually(lambda: "no_sequencer" not in conditions())
    assert incidents() == []
