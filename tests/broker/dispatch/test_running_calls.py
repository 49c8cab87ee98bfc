"""The file in which a process notes its running calls, from both sides."""

from __future__ import annotations

import os
import resource
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from outbox.broker.consumer import running_calls
from outbox.broker.consumer.running_calls import RunningCalls
from outbox.broker.groups.quarantine import RunningCall
from outbox.broker.supervisor import ChildDeath, ChildSpec, Supervisor
from outbox.errors import BrokerUnavailable
from outbox.utils.backoff import Backoff
from tests.support import eventually

QUICK = Backoff(first_seconds=0.01, longest_seconds=0.05)


@pytest.fixture
def file() -> Iterator[Any]:
    with tempfile.TemporaryFile() as file:
        yield file


def test_the_parent_sees_what_runs_and_not_what_has_come_back(file: Any) -> None:
    assert running_calls.read(file.fileno()) is None
    instance = uuid4()
    calls = RunningCalls(file.fileno(), instance, calls=3, batch=4)
    first = calls.note(5, [11, 12, 13, 14], alone=False)
    calls.note(6, [2**62], alone=True)
    assert first is not None
    calls.forget(first)
    # A slot is used again, also if a longer entry was in it before.
    calls.note(7, [1], alone=False)
    calls.note(7, [2], alone=False)
    assert calls.note(7, [3], alone=False) is None, "there are three slots"
    left = running_calls.read(file.fileno())
    assert left is not None and (left.instance, left.told_to_stop) == (instance, False)
    assert sorted(left.calls, key=str) == [
        RunningCall(6, (2**62,), True),
        RunningCall(7, (1,), False),
        RunningCall(7, (2,), False),
    ]
    calls.told_to_stop()
    left = running_calls.read(file.fileno())
    assert left is not None and left.told_to_stop


def test_a_nearly_full_disk_is_an_error_of_the_disk(file: Any) -> None:
    """The process then runs without notes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="space"):
            RunningCalls(file.fileno(), uuid4(), calls=3, batch=4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize(
    "content",
    [
        b"x" * 100,
        b"outbox-1",
        struct.pack("=8sIII16s", b"outbox-1", 2**31, 24, 0, bytes(16)),
        struct.pack("=8sIII16sIIi4xq", b"outbox-1", 1, 24, 0, bytes(16), 9, 0, 1, 1),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(file: Any, content: bytes) -> None:
    os.pwrite(file.fileno(), content, 0)
    with pytest.raises(ValueError, match=r"."):
        running_calls.read(file.fileno())


NOTING = """
import os, uuid
from outbox.broker.consumer import running_calls
calls = running_calls.inherited(uuid.UUID(int=1), calls=1, batch=1)
calls.note(5, [11], alone=False)
# Not handed down any further: a process started from here has a life of its own.
assert running_calls.VARIABLE not in os.environ
os._exit(7)
"""


def supervised(*children: tuple[str, Any]) -> Supervisor:
    """Children by the names c0, c1, …, each with its program and what is told of its deaths."""
    return Supervisor(
        [
            ChildSpec(name=f"c{number}", argv=[sys.executable, "-c", program], on_death=told)
            for number, (program, told) in enumerate(children)
        ],
        backoff=QUICK,
    )


def test_the_supervisor_records_a_death_before_it_restarts_and_repeats_until_it_is_stored() -> None:
    """While the broker's database is away the child is not started: it would run into the same message."""
    deaths: list[ChildDeath] = []

    def told(death: ChildDeath) -> None:
        deaths.append(death)
        if len(deaths) < 3:
            raise BrokerUnavailable

    supervisor = supervised((NOTING, told))
    supervisor.start()
    eventually(lambda: len(deaths) >= 4)
    supervisor.stop()
    assert deaths[0] is deaths[1] is deaths[2] and deaths[3] is not deaths[0]
    (death, left) = (deaths[0], deaths[0].left_behind)
    assert (death.child, death.how, death.hung) == ("c0", "exit code 7", False)
    assert left is not None and (left.instance.int, left.calls) == (1, [RunningCall(5, (11,), False)])


def test_what_is_told_of_a_death_without_running_calls(tmp_path: Path) -> None:
    """Notes that make no sense or are missing are none, a listener that fails keeps no child down, and a child that has
    drained died of nothing."""
    unreadable, silent, drained = list[ChildDeath](), list[ChildDeath](), list[ChildDeath]()
    mark, of_drained = tmp_path / "runs", tmp_path / "drained"

    def fails(death: ChildDeath) -> None:
        raise RuntimeError("told wrongly")

    nonsense = "import os; os.pwrite(int(os.environ['OUTBOX_RUNNING_CALLS_FD']), b'nonsense' * 9, 0); os._exit(7)"
    supervisor = supervised(
        (nonsense, unreadable.append),
        ("import os; os._exit(7)", silent.append),
        (f"open({str(mark)!r}, 'a').write('x'); exit(7)", fails),
        (f"open({str(of_drained)!r}, 'a').write('x')", drained.append),
    )
    supervisor.start()
    eventually(lambda: len(unreadable) >= 2 and len(silent) >= 2)
    for path in (mark, of_drained):
        eventually(lambda path=path: path.exists() and len(path.read_text()) >= 3)  # type: ignore[misc]
    supervisor.stop()
    assert unreadable[0].left_behind is silent[0].left_behind is None
    assert drained == []
