"""Handle each quarantined message (groups.quarantine) alone: if the process dies, this message is the cause.

    found in a call ──► divided ──► held ──► tried ──► cleared, sent back, tried again later, or given up
                      from others    │ until nothing else runs here and nothing else is started;
                                     │ then a note about the attempt is committed

In ordered modes, the queue or key of the message waits for the result of the attempt. In concurrent mode, only the
message itself waits. If a message was quarantined only because its handler hung, other calls may run during its
attempt.

See decision 065.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Sequence
from typing import Final
from uuid import UUID

from outbox.broker.consumer.call import NOT_STARTED, HandlerCall, Postponed, Result
from outbox.broker.consumer.fetch import LOG_ID
from outbox.broker.consumer.lanes import FetchedEntry, divide
from outbox.broker.consumer.owned_queue import Phase
from outbox.broker.consumer.scheduler import Calls
from outbox.broker.database.executor import Executor
from outbox.broker.groups import quarantine
from outbox.broker.groups.send_back import describe
from outbox.errors import HandlerTimedOut, KillsItsProcess, LeaseLost
from outbox.ports import ClaimedElsewhere

# If the attempt with a message may not begin, the message waits for one of these times (seconds). The first constant
# applies while another attempt is running in this process, and the second constant applies while this process drains.
_ANOTHER_SECONDS: Final = 0.1
_DRAINING_SECONDS: Final = 3600.0

# A process that meets its first quarantined message handles other messages for this long (seconds) before the first
# attempt. Otherwise, if a message kills each process, every new process would try it at once, and the messages of
# other queues would wait until the third death.
_OTHERS_FIRST_SECONDS: Final = 1.0


class QuarantineRunner:
    """Runs at most one attempt with quarantined messages at a time. Only the dispatching thread uses this class."""

    def __init__(self, instance: UUID, calls: Calls) -> None:
        self._instance = instance
        self._host = socket.gethostname()
        self._calls = calls
        # The attempt that is running, or that waits for running calls (`_waits`). `silent`: whether it must run alone,
        # so that the process may start no other call.
        self.held: HandlerCall | None = None
        self.silent = False
        self._waits = False
        self._draining = False
        # The time (time.monotonic) from which this process may begin attempts; None until it meets such a message.
        self._begin_at: float | None = None
        # Functions that store the results of finished attempts.
        self.verdicts: list[Callable[[Executor], None]] = []

    def bound(self) -> None:
        """Begin the attempts at once, because a bounded pass does not wait for what is due later."""
        self._begin_at = 0.0

    def drain(self) -> None:
        """Begin no more attempts with quarantined messages in this process."""
        self._draining = True

    def takes(self, run: Executor, work: HandlerCall) -> bool:
        """Take a call over if it has quarantined messages. Return False if the call has no such message.

        If a statement fails, this method puts the messages of the call back into their lane, and raises the error.
        """
        known = work.subscribed.group.quarantined
        found = [item for item in work.items if _log_id(item) in known]
        if not found:
            return False
        if self._begin_at is None:
            self._begin_at = time.monotonic() + _OTHERS_FIRST_SECONDS
        size = max(1, min(known[_log_id(item)].call_size for item in found) // 2)
        if len(found) < len(work.items) or len(found) > size:
            _set_apart(work.items, {id(item) for item in found}, size)
            _put_back(work, 0.0)
        elif time.monotonic() < self._begin_at:
            _put_back(work, self._begin_at)
        elif self.held is not None or self._draining:
            _put_back(work, time.monotonic() + (_DRAINING_SECONDS if self._draining else _ANOTHER_SECONDS))
        elif wait_seconds := self._wait_seconds(run, work):
            _put_back(work, time.monotonic() + wait_seconds)
        else:
            self.held, self._waits = work, True
            self.silent = not all(known[_log_id(item)].hung for item in found)
            self._calls.hold(work)
        return True

    def _wait_seconds(self, run: Executor, work: HandlerCall) -> float:
        """Return how long the attempt must wait.

        The process calls this method before it stops starting other calls. Otherwise, the other calls would wait for an
        attempt that may not begin yet.
        """
        group = work.subscribed.group
        try:
            return quarantine.ask(
                run, self._instance, group.group_id, _log_ids(work), by_all=group.broadcast
            ).wait_seconds
        except BaseException:
            _put_back(work, 0.0)
            raise

    def proceed(self, run: Executor) -> None:
        """Begin the waiting attempt if it may begin now. If a statement fails, the attempt continues to wait."""
        work = self.held
        if work is None or not self._waits or (self.silent and self._calls.runs_beside(work)):
            return
        now, group = time.monotonic(), work.subscribed.group
        refusal: Result
        if self._draining:
            refusal = Postponed(now + _DRAINING_SECONDS)
        elif group.paused or not all(item.queue.may_start() for item in work.items):
            refusal = NOT_STARTED
        else:
            # Commit a note about the attempt, unless it may not begin.
            attempt = quarantine.begin_attempt(
                run, self._instance, self._host, group.group_id, _log_ids(work), by_all=group.broadcast
            )
            if not attempt.deaths and not attempt.wait_seconds:
                self._waits = False
                work.alone = self.silent
                self._calls.start(work)
                return
            told = f"this message, tried alone, has killed or hung its process {attempt.deaths}"
            refusal = KillsItsProcess(told) if attempt.deaths else Postponed(now + attempt.wait_seconds)
        self._waits = False
        self._calls.refuse(work, refusal)

    def over(self, work: HandlerCall, results: Sequence[Result], excused: Collection[int]) -> None:
        """Record a finished call.

        If the finished call was the attempt with quarantined messages, this process may start other calls again.

        `excused` has the ids of the items for which this process calls the handler again, because these items have not
        caused the failure.
        """
        if work is not self.held:
            return
        self.held, self.silent = None, False
        # Add a result for a refused call, too: the note of the call may have been committed although the statement
        # seemed to fail.
        self.verdicts.append(self._verdict(work, results, excused))

    def store_verdicts(self, run: Executor) -> None:
        """Store the results of finished attempts. Call this before an offset passes the messages of these attempts."""
        while self.verdicts:
            self.verdicts[0](run)
            self.verdicts.pop(0)

    def _verdict(
        self, work: HandlerCall, results: Sequence[Result], excused: Collection[int]
    ) -> Callable[[Executor], None]:
        group, log_ids, items = work.subscribed.group, _log_ids(work), work.items
        # A call that timed out during its COMMIT has the result LeaseLost.
        hangs = [one for one in results if isinstance(one, (HandlerTimedOut, LeaseLost))] if work.abandoned else []
        is_undecided = all(
            result is NOT_STARTED or isinstance(result, (Postponed, ClaimedElsewhere)) for result in results
        )

        def write(run: Executor) -> None:
            if is_undecided or (hangs and excused):
                quarantine.end_attempts(run, self._instance)
            elif hangs:
                quarantine.record_hang(run, group.group_id, log_ids, describe(hangs[0]))
            elif not any(isinstance(result, KillsItsProcess) for result in results):
                quarantine.clear(run, group.group_id, log_ids)
            elif not group.broadcast and all(map(_is_finished, items)):
                # The group has given the messages up. In a broadcast group, each instance has its own outcome, and
                # deleting the rows would clear the messages for all instances.
                quarantine.clear(run, group.group_id, log_ids)

        return write


def _is_finished(item: FetchedEntry) -> bool:
    window = item.queue.window
    return item.queue.phase is not Phase.LOST and (item.offset < window.base or window.is_finished(item.offset))


def _set_apart(items: Sequence[FetchedEntry], found: set[int], size: int) -> None:
    """Divide a call into parts: a part has up to `size` quarantined messages, or only other messages."""
    start = 0
    for end in range(1, len(items) + 1):
        if end == len(items) or (id(items[end]) in found) != (id(items[start]) in found):
            run = items[start:end]
            divide(run, size if id(run[0]) in found else len(run))
            start = end


def _put_back(work: HandlerCall, due: float) -> None:
    for item in work.items:
        item.due = due
    work.lane.end([*work.items, *work.expired], work.items)


def _log_id(item: FetchedEntry) -> int:
    assert item.row is not None
    log_id: int = item.row[LOG_ID]
    return log_id


def _log_ids(work: HandlerCall) -> list[int]:
    return [_log_id(item) for item in work.items]
