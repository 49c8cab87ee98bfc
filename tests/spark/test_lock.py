"""The lock of an output folder, on a disk and in an object store, with real processes that are killed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spark.common import lock
from spark.common.errors import RunIncomplete
from spark.common.store import Store
from tests.spark import object_store
from tests.spark.conftest import Reconciler
from tests.spark.test_processes import ROOT
from tests.spark.world import Order, World

pytestmark = pytest.mark.timeout(600)

# Holds the lock until its standard input ends.
HOLDER = """
import sys
from spark.common import lock
from spark.common.store import Store
store = Store(sys.argv[1])
store.check_writable()
with lock.hold(store):
    print("held", flush=True)
    sys.stdin.read()
"""
# Takes and releases the lock `sys.argv[2]` times, and counts in a file how many processes hold it.
RACER = """
import sys
from pathlib import Path
from spark.common import lock
from spark.common.errors import RunIncomplete
from spark.common.store import Store
store, marks, held = Store(sys.argv[1]), Path(sys.argv[3]), 0
store.check_writable()
for _ in range(int(sys.argv[2])):
    try:
        with lock.hold(store):
            (marks / "in").touch(exist_ok=False)
            held += 1
            (marks / "in").unlink()
    except RunIncomplete:
        pass
print(held)
"""


@pytest.fixture(params=["disk", pytest.param("object store", marks=pytest.mark.slow)])
def location(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An output folder as the option --output gives it."""
    if request.param == "disk":
        yield str(tmp_path / "out")
        return
    with object_store.running(tmp_path) as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield f"s3a://{object_store.BUCKET}/out"


@contextmanager
def holder(location: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", HOLDER, location], cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_second_run_is_refused_until_the_first_ends_or_is_killed(location: str) -> None:
    store = Store(location)
    with holder(location) as process:
        with pytest.raises(RunIncomplete) as caught, lock.hold(store):
            pass
        for part in (f"process {process.pid} on host {socket.gethostname()}, since 2", location.removeprefix("s3a")):
            assert part in str(caught.value)
        process.kill()
        process.wait()
        with lock.hold(store), pytest.raises(RunIncomplete, match=f"process {os.getpid()}"), lock.hold(store):
            pass
    # An orderly end leaves nothing that names a process.
    with lock.hold(store):
        pass
    assert store.files(lock.FOLDER) == []
    assert not store.read(lock.FILE)


def test_of_processes_that_start_at_once_only_one_holds_the_lock(location: str, tmp_path: Path) -> None:
    marks, rounds = tmp_path / "marks", 6
    marks.mkdir()
    command = [sys.executable, "-c", RACER, location, str(rounds), str(marks)]
    racers = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [racer.communicate()[0] for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0], said
    assert sum(map(int, said)) > 0


def _no_process(holder: dict[str, object]) -> None:
    holder["pid"] = 2**22 + 1


def _other_kernel(holder: dict[str, object]) -> None:
    holder["kernel"] = "another machine"


@pytest.mark.parametrize(
    ("change", "ended"),
    [(lambda holder: None, False), (_no_process, True), (_other_kernel, False)],
    ids=["runs", "no process has its id", "of another machine"],
)
def test_a_process_has_ended_only_if_this_machine_proves_it(
    change: Callable[[dict[str, object]], None], ended: bool
) -> None:
    named = lock._this_process()
    change(named)
    assert lock.has_ended(named) is ended


@pytest.mark.slow
def test_a_run_does_nothing_while_another_process_holds_the_lock(reconcile: Reconciler, world: World) -> None:
    world.add(Order(number=1))
    with holder(str(reconcile.folder / reconcile.output)):
        with pytest.raises(RunIncomplete, match="holds the lock of the output folder"):
            reconcile.run()
    assert sorted(path.name for path in (reconcile.folder / reconcile.output).iterdir()) == ["run.lock", "runs"]
    assert reconcile.run()["totals"]["OK"] == 1
