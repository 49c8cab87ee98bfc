"""The supervisor keeps the broker's processes alive: it starts, restarts and drains its child processes.

If a child with `on_death` dies, the supervisor reads which handler calls were running in the child
(`outbox.broker.consumer.running_calls`). The supervisor calls `on_death` before it starts the child again. The
supervisor also calls `on_death` for a child that was killed while it drained, so that the child's leases are released
before they expire.

Each child is a new interpreter, never a fork of a process with threads and connections. Each child has its own session
of the operating system, so a Ctrl-C at the terminal reaches only the supervisor. If the parent process does not exist
any more, a child ends itself (`stop_with_parent`), even if the parent was killed with SIGKILL.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Final

from outbox.broker.consumer import running_calls
from outbox.broker.consumer.running_calls import LastCalls
from outbox.broker.process_log import always
from outbox.errors import BrokerUnavailable
from outbox.utils.backoff import Backoff
from outbox.utils.safe_text import printable

logger = logging.getLogger(__name__)

PARENT_VARIABLE: Final = "OUTBOX_PARENT_PID"
_PARENT_POLL_SECONDS: Final = 0.25
# Service managers commonly kill a process 30 s after they asked it to stop. So children have less than 30 s to finish
# their work.
DRAIN_SECONDS: Final = 20.0


# The exit code of a consumer process whose handlers hang.
HUNG_EXIT_CODE: Final = 3


@dataclass(frozen=True, kw_only=True)
class ChildDeath:
    """The end of a child that has failed, or that ended in the middle of a handler call.

    `left_behind` has the child's notes about its running calls; None if the notes cannot be read. `told_to_stop`: the
    child had been asked to end, or this supervisor has killed it, so its running calls are not the cause of its death.
    """

    child: str
    how: str
    hung: bool
    left_behind: LastCalls | None
    told_to_stop: bool = False


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """A child process that the supervisor starts, and starts again after its end.

    The supervisor calls `on_death` for each death of the child. If `on_death` raises BrokerUnavailable, the supervisor
    calls `on_death` again after a pause.
    """

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    on_death: Callable[[ChildDeath], None] | None = None


# If a child has run for 10 s before it ends, the pause before its restart is the shortest pause again.
_TELL_AGAIN: Final = Backoff(first_seconds=0.5, longest_seconds=10.0)
RESTART: Final = Backoff(first_seconds=0.2, longest_seconds=30.0, healthy_seconds=10.0)


class Supervisor:
    """Runs child processes until `stop` is called. One thread per child waits for the end of the child and restarts it.

    The supervisor adds `environment` to the environment of every child. After `stop`, the children have `drain_seconds`
    to finish their work. `consumes` has topics and groups for the log line at the start.
    """

    def __init__(
        self,
        children: Sequence[ChildSpec],
        *,
        environment: Mapping[str, str] | None = None,
        drain_seconds: float = DRAIN_SECONDS,
        backoff: Backoff = RESTART,
        consumes: Sequence[str] = (),
    ) -> None:
        self._children = children
        self._consumes = consumes
        self._environment = environment or {}
        self._drain_seconds = drain_seconds
        self._drain_until: float | None = None
        self._backoff = backoff
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._threads = [
            threading.Thread(target=self._keep_alive, args=[spec], name=f"supervise-{spec.name}", daemon=True)
            for spec in children
        ]

    def start(self) -> None:
        """Start all children, and return at once."""
        names = ", ".join(spec.name for spec in self._children)
        always(logger, f"outbox starts {names}; it consumes {', '.join(self._consumes) or 'nothing'}")
        for thread in self._threads:
            thread.start()

    def pids(self) -> dict[str, int]:
        """Return the process ids of the children that run now, by name."""
        with self._lock:
            return {name: process.pid for name, process in self._processes.items() if process.poll() is None}

    def drain(self) -> None:
        """Ask all children to finish their work and to end (SIGTERM), and return at once."""
        if self._drain_until is None:
            self._drain_until = time.monotonic() + self._drain_seconds
            self._stopping.set()
            logger.info("draining children %s", self.pids())
            self._signal_all(signal.SIGTERM)

    def stop(self) -> None:
        """Drain the children and wait for them. After `drain_seconds`, kill the children that still run."""
        self.drain()
        deadline = self._drain_until or 0.0
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
        if self.pids():
            logger.error("children %s did not end within %.0f s: killed", self.pids(), self._drain_seconds)
            self.kill()
            for thread in self._threads:
                thread.join()

    def kill(self) -> None:
        """Kill all children at once (SIGKILL). The messages that the children were handling are delivered again."""
        self._stopping.set()
        self._signal_all(signal.SIGKILL)

    def _signal_all(self, signal_number: signal.Signals) -> None:
        with self._lock:
            for process in self._processes.values():
                process.send_signal(signal_number)

    def _keep_alive(self, spec: ChildSpec) -> None:
        failures = 0
        while not self._stopping.is_set():
            started = time.monotonic()
            with _calls_file(spec) or contextlib.nullcontext() as calls:
                code = self._run(spec, calls)
                if spec.on_death is not None and code is not None:
                    self._tell(spec.name, spec.on_death, code, calls)
                if self._stopping.is_set():
                    return
            failures = self._backoff.failures_in_a_row(failures, ran_seconds=time.monotonic() - started)
            delay = self._backoff.pause_seconds(failures)
            logger.warning("child %s ended (%s), restart in %.1f s", spec.name, _how(code), delay)
            self._stopping.wait(delay)

    def _run(self, spec: ChildSpec, calls: IO[bytes] | None) -> int | None:
        """Start a child and wait for its end. Return its exit code; None if the system cannot start it now."""
        environment = {**os.environ, **self._environment, **spec.environment, PARENT_VARIABLE: str(os.getpid())}
        descriptors = [calls.fileno()] if calls is not None else []
        if descriptors:
            environment[running_calls.VARIABLE] = str(descriptors[0])
        # The lock is not held while the process starts, because `stop` needs the lock and must not wait until the new
        # program has started.
        try:
            process = subprocess.Popen(
                list(spec.argv),
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=descriptors,
            )
        except OSError as error:
            # The memory is short, there are too many processes, or the interpreter is being replaced.
            logger.error("child %s cannot be started: %s", spec.name, error)
            return None
        with self._lock:
            self._processes[spec.name] = process
            if self._stopping.is_set():
                process.terminate()
        logger.info("child %s started, pid %d", spec.name, process.pid)
        return process.wait()

    def _tell(self, name: str, on_death: Callable[[ChildDeath], None], code: int, calls: IO[bytes] | None) -> None:
        """Call `on_death` before the child starts again.

        If the child started first, the child would again handle the message that killed it.

        After `stop`, the supervisor makes only one attempt to call `on_death`, because the service manager does not
        wait for more.
        """
        is_stopping = self._stopping.is_set()
        left = _left_behind(name, calls)
        told_to_stop = is_stopping or (left is not None and left.told_to_stop)
        if told_to_stop and (left is None or code == 0):
            return
        # A handler may exit with any code, so the notes tell why the process has ended.
        if code == 0 and not (left is not None and left.calls):
            return
        hung = code == HUNG_EXIT_CODE and (left is None or left.hung)
        death = ChildDeath(child=name, how=_how(code), hung=hung, left_behind=left, told_to_stop=told_to_stop)
        failures = 0
        while True:
            try:
                on_death(death)
                return
            except BrokerUnavailable as error:
                if self._stopping.is_set():
                    logger.warning("child %s died, and its leases last until they expire: %s", name, error)
                    return
                # While the database is not reachable, the child could not consume messages, so its restart can wait.
                failures += 1
                logger.warning("child %s is not restarted until its death is recorded: %s", name, error)
                self._stopping.wait(_TELL_AGAIN.pause_seconds(failures))
            except Exception as error:
                logger.error(
                    "the running calls of dead child %s (%s) could not be recorded",
                    name,
                    death.how,
                    exc_info=printable(error),
                )
                return


def _calls_file(spec: ChildSpec) -> IO[bytes] | None:
    """Make the file in which a child notes its running calls; None without `on_death`, or if the disk is full.

    The file has no name, so the operating system removes it as soon as no process has it open.
    """
    try:
        return tempfile.TemporaryFile() if spec.on_death is not None else None
    except OSError as error:
        logger.warning(
            "the running calls of child %s cannot be recorded, so a message that kills this child is not found: %s",
            spec.name,
            error,
        )
        return None


def _left_behind(name: str, calls: IO[bytes] | None) -> LastCalls | None:
    if calls is None:
        return None
    try:
        return running_calls.read(calls.fileno())
    except (OSError, ValueError) as error:
        logger.warning("the running calls of dead child %s cannot be read: %s", name, error)
        return None


def _how(code: int | None) -> str:
    if code is None:
        return "not started"
    if code >= 0:
        return f"exit code {code}"
    # Most real-time signals have no name.
    names = {number.value: number.name for number in signal.Signals}
    return f"signal {names.get(-code, -code)}"


def stop_on_signals(stop: threading.Event) -> dict[signal.Signals, Any]:
    """Set `stop` on SIGTERM and SIGINT, and return the previous signal handlers. Call this in the main thread.

    A helper thread sets `stop`, because the signal handler runs in the main thread. At this moment, the main thread may
    be waiting for `stop`, and may own the lock inside `stop`. A second Ctrl-C raises KeyboardInterrupt at once.
    """

    def handle(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=stop.set, name="outbox-signal", daemon=True).start()

    return {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}


def stop_with_parent(stop: threading.Event, *, grace_seconds: float = 10.0) -> None:
    """In a child process, set `stop` when the parent process has ended, and exit `grace_seconds` after that.

    If no Supervisor started this process, the function does nothing. The function compares the present pid of the
    parent with the pid of the Supervisor, because the kernel gives another parent to a process whose parent has ended.
    The function uses no pipe to the parent, because the pipe would stay open in other processes that the parent forked.
    """
    parent = os.environ.get(PARENT_VARIABLE)
    if not parent:
        return

    def watch() -> None:
        pause = threading.Event()
        while os.getppid() == int(parent):
            pause.wait(_PARENT_POLL_SECONDS)
        with contextlib.suppress(Exception):
            logger.warning("the supervising process %s is gone, stopping", parent)
        stop.set()
        pause.wait(grace_seconds)
        os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def end_within(seconds: float, code: int) -> None:
    """Exit after `seconds` at the latest, because the ordinary end of the process may wait for hanging threads."""

    def watch() -> None:
        threading.Event().wait(seconds)
        os._exit(code)

    threading.Thread(target=watch, name="end", daemon=True).start()
