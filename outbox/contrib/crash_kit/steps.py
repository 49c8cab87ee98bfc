"""The steps of a scenario, at which the crash kit kills or pauses the process.

A step is a fault point of outbox, an SQL statement or a COMMIT on a connection of Django, or a call that the kit
records. Each step has the line of the application that caused it. `Walk` notes the steps of one process in a file, so
that the steps survive the kill.
"""

from __future__ import annotations

import inspect
import json
import linecache
import os
import random
import re
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache, wraps
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import asgiref
import django
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

import outbox
from outbox.contrib.django.database import transactions
from outbox.utils import faults

# The fault points of outbox that are steps: all points on the way of a message to its handler. The points just before a
# statement of outbox differ in nothing from the step before them. The points before a COMMIT are missing, because the
# kit watches each COMMIT.
_NO_STEPS: Final = frozenset(
    {
        "producer.before_ledger",
        "producer.before_half",
        "producer.before_local_commit",
        "consumer.before_inbox_commit",
        "claim.before_commit",
    }
)
POINTS: Final = tuple(
    point
    for point in faults.POINTS
    if point.startswith(("producer.", "consumer.", "claim.")) and point not in _NO_STEPS
)

_SHOWN_CHARACTERS: Final = 90
_SAVEPOINT: Final = re.compile(r'(SAVEPOINT) "?\w+"?$')
# Files below these folders are not the application's. The application may be in a folder below the standard library's
# parent, so the folders of packages are named one by one.
_ASGIREF: Final = str(Path(asgiref.__file__).parent) + os.sep
_OUTBOX: Final = str(Path(outbox.__file__).parent) + os.sep
# The execute wrappers of outbox and of the kit are between the application and each statement.
_WATCHING: Final = (__file__, transactions.__file__)
_FOREIGN: Final = tuple(
    {
        _OUTBOX,
        str(Path(django.__file__).parent) + os.sep,
        *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        "<",
    }
)


@dataclass(frozen=True, slots=True)
class Step:
    """One step, and its number `visit` among the steps of this name at this place in this handler.

    `place`: the innermost line of the application. `caller`: the line of the handler or scenario, if this is another.
    `handler`: the group and topic of the handler that reached the step, or ''.
    """

    name: str
    place: str
    caller: str
    handler: str
    visit: int

    @property
    def reads(self) -> bool:
        """Whether the step is a SELECT of a handler, after which another handler may change the rows."""
        return bool(self.handler) and self.name.startswith("after SELECT")

    @property
    def commits(self) -> bool:
        """Whether this is the step before a statement that changes rows and commits by itself."""
        return self.name.startswith("before ") and not self.name.startswith(("before COMMIT", "before SELECT"))

    @property
    def lines(self) -> list[str]:
        """The lines of the application, with their source."""
        return [f"{place} `{_source(place)}`" for place in (self.caller, self.place) if place]


class _Thread(threading.local):
    """The code of the handler or scenario that runs in this thread, and the last line that it has reached."""

    root: CodeType | None = None
    handler = ""
    place = ""
    caller = ""


class Walk:
    """Notes the steps of this process, and calls `act` at one of them."""

    def __init__(self, file: Path, target: Step | None = None, act: Callable[[], None] = lambda: None) -> None:
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._target = target
        self._act = act
        self._visits: Counter[tuple[str, str, str, str]] = Counter()
        self._lock = threading.Lock()
        self._thread = _Thread()

    def install(self) -> None:
        """Watch the fault points and all connections that this process opens from now on."""
        faults.observe(POINTS, self.reach)
        connection_created.connect(self._watch, weak=False)
        for connection in connections.all(initialized_only=True):
            self._watch(None, connection)

    def enter(self, function: Callable[..., Any], handler: str = "") -> None:
        """Remember that this thread runs the scenario, or a handler, named by its group and topic."""
        here = self._thread
        here.root, here.handler = getattr(inspect.unwrap(function), "__code__", None), handler
        here.place = f"{here.root.co_filename}:{here.root.co_firstlineno}" if here.root else ""
        here.caller = ""

    def leave(self) -> None:
        """Forget the function that `enter` has named for this thread."""
        here = self._thread
        here.root, here.handler, here.place, here.caller = None, "", "", ""

    def reach(self, name: str) -> None:
        """Note a step, and act if it is the wanted one."""
        here = self._thread
        found = _places(sys._getframe(1), here.root)
        if found is not None:
            here.place, here.caller = found
        with self._lock:
            key = (name, here.place, here.caller, here.handler)
            self._visits[key] += 1
            step = Step(*key, self._visits[key])
            os.write(self._descriptor, (json.dumps(astuple(step)) + "\n").encode())
        if step == self._target:
            self._act()

    def _watch(self, sender: object, connection: BaseDatabaseWrapper, **_: object) -> None:
        if any(getattr(wrapper, "is_step", False) for wrapper in connection.execute_wrappers):
            return

        def execute(run: Callable[..., Any], sql: Any, params: Any, many: bool, context: dict[str, Any]) -> Any:
            text = shown(sql)
            if not _is_asked_by_application(sys._getframe()):
                # A statement of outbox itself: its steps are the fault points.
                return run(sql, params, many, context)
            if not connection.in_atomic_block:
                # The statement commits by itself. So a crash before it differs from a crash after it.
                self.reach(f"before {text}")
            result = run(sql, params, many, context)
            self.reach(f"after {text}")
            return result

        execute.is_step = True  # type: ignore[attr-defined]
        connection.execute_wrappers.append(execute)
        _watch_commits(connection, self.reach)


def _watch_commits(connection: BaseDatabaseWrapper, reach: Callable[[str], None]) -> None:
    original = connection.commit

    @wraps(original)
    def commit() -> None:
        reach(f"before COMMIT on {connection.alias!r}")
        original()
        # Django calls the on_commit callbacks later.
        reach(f"after COMMIT on {connection.alias!r}")

    connection.commit = commit  # type: ignore[method-assign]


def read_steps(file: Path) -> list[Step]:
    """Return the steps that a process has noted. A line that the kill has cut off is left out."""
    if not file.exists():
        return []
    return [Step(*json.loads(line)) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def shown(sql: Any) -> str:
    """Return a statement in one short line, which is the same in every run."""
    text = " ".join(str(sql).split())
    text = _SAVEPOINT.sub(r"\1", text)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"


def _places(frame: FrameType | None, root: CodeType | None) -> tuple[str, str] | None:
    """Return the innermost line of the application and the line of `root`, or None without such a line.

    Without a root, because outbox calls the handler in a saga, the second line is the one that outbox has called.
    """
    innermost = outermost = ""
    for code, line in _frames(frame):
        if not _is_of_application(code.co_filename):
            if root is None and innermost and code.co_filename.startswith(_OUTBOX):
                break
            continue
        outermost = f"{code.co_filename}:{line}"
        innermost = innermost or outermost
        if code is root:
            break
    else:
        outermost = innermost
    return (innermost, "" if outermost == innermost else outermost) if innermost else None


def _is_asked_by_application(frame: FrameType | None) -> bool:
    """Whether the application has executed the statement below this frame, and not outbox."""
    for code, _ in _frames(frame):
        if code.co_filename in _WATCHING:
            continue
        if code.co_filename.startswith(_OUTBOX):
            return False
        # A coroutine that awaits a query is not below the query on the stack; asgiref, which runs the query, is.
        if _is_of_application(code.co_filename) or code.co_filename.startswith(_ASGIREF):
            return True
    return False


def _frames(frame: FrameType | None) -> Iterator[tuple[CodeType, int]]:
    while frame is not None:
        yield frame.f_code, frame.f_lineno
        frame = frame.f_back


@lru_cache
def _is_of_application(file: str) -> bool:
    return not file.startswith(_FOREIGN)


def _source(place: str) -> str:
    file, _, line = place.rpartition(":")
    return linecache.getline(file, int(line)).strip()


def failed_at(error: BaseException) -> str:
    """Return the innermost line of the application in the traceback of an error, with its source, or ''."""
    places = [f"{code.co_filename}:{line}" for code, line in _traced(error) if _is_of_application(code.co_filename)]
    return f"{places[-1]} `{_source(places[-1])}`" if places else ""


def _traced(error: BaseException) -> Iterator[tuple[CodeType, int]]:
    entry = error.__traceback__
    while entry is not None:
        yield entry.tb_frame.f_code, entry.tb_lineno
        entry = entry.tb_next


def short(place: str, folder: Path) -> str:
    """Return a place with its path relative to the folder, if the file is there."""
    return place.removeprefix(f"{folder}{os.sep}")


def chosen(steps: Sequence[Step], most: int, *, every_visit: bool, seed: int) -> list[Step]:
    """Return at most this number of steps, in their order. Without `every_visit`, return first visits only.

    If there are more, the choice depends on `seed`.
    """
    wanted = [step for step in steps if every_visit or step.visit == 1]
    if len(wanted) <= most:
        return wanted
    return [wanted[number] for number in sorted(random.Random(seed).sample(range(len(wanted)), most))]
