"""The supervisor with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outbox.broker.supervisor import ChildSpec, Supervisor
from outbox.utils.backoff import Backoff
from tests.support import eventually

SLEEP = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: exit(0)); time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)
QUICK = Backoff(first_seconds=0.01, longest_seconds=0.05)


def child(name: str, program: str) -> ChildSpec:
    return ChildSpec(name=name, argv=[sys.executable, "-c", program])


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    supervisor = Supervisor([child("one", SLEEP), child("two", SLEEP)], backoff=QUICK, drain_seconds=20)
    supervisor.start()
    yield supervisor
    supervisor.kill()
    supervisor.stop()


def test_dead_child_is_restarted_the_other_left_alone_and_both_drained(supervisor: Supervisor) -> None:
    before = eventually(lambda: supervisor.pids() if len(supervisor.pids()) == 2 else {})
    assert {os.getsid(pid) for pid in before.values()} == set(before.values()), "each leads a session of its own"
    os.kill(before["one"], signal.SIGKILL)
    after = eventually(lambda: pids if (pids := supervisor.pids()).get("one", before["one"]) != before["one"] else {})
    assert after["two"] == before["two"]
    supervisor.stop()
    assert supervisor.pids() == {}


def test_child_that_does_not_drain_is_killed(tmp_path: Path) -> None:
    mark = tmp_path / "up"
    program = STUBBORN.replace("print('up', flush=True)", f"open({str(mark)!r}, 'w').close()")
    supervisor = Supervisor([child("stubborn", program)], drain_seconds=0.2)
    supervisor.start()
    eventually(mark.exists)
    supervisor.stop()
    assert supervisor.pids() == {}


def test_child_ends_with_its_killed_parent(tmp_path: Path) -> None:
    """The parent is killed with SIGKILL; the child drains by itself."""
    drained = tmp_path / "drained"
    grandchild = (
        "import threading; from outbox.broker.supervisor import stop_with_parent\n"
        "stop = threading.Event(); stop_with_parent(stop); print('up', flush=True); stop.wait()\n"
        f"open({str(drained)!r}, 'w').close()"
    )
    parent = (
        "import sys, time; from outbox.broker.supervisor import ChildSpec, Supervisor\n"
        f"Supervisor([ChildSpec(name='c', argv=[sys.executable, '-c', {grandchild!r}])]).start(); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    process.kill()
    process.wait()
    process.stdout.close()
    eventually(drained.exists)


def test_child_that_cannot_be_started_is_started_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The interpreter is replaced, memory is short, or there are too many processes."""
    interpreter, mark = tmp_path / "python", tmp_path / "up"
    spec = ChildSpec(name="late", argv=[str(interpreter), "-c", f"open({str(mark)!r}, 'w').close(); {SLEEP}"])
    supervisor = Supervisor([spec], backoff=QUICK)
    supervisor.start()
    try:
        eventually(lambda: "child late cannot be started: [Errno 2]" in caplog.text)
        interpreter.symlink_to(sys.executable)
        eventually(mark.exists)
    finally:
        supervisor.kill()
        supervisor.stop()


def test_child_is_restarted_after_a_signal_without_a_name(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    program = f"import os; open({str(marks)!r}, 'a').write('x'); os.kill(os.getpid(), {signal.SIGRTMIN + 5})"
    supervisor = Supervisor([child("odd", program)], backoff=QUICK)
    supervisor.start()
    try:
        eventually(lambda: marks.exists() and len(marks.read_text()) > 1)
    finally:
        supervisor.kill()
        supervisor.stop()
