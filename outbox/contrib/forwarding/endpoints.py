"""The endpoints of OUTBOX['FORWARD']: which of them are disabled, and what their processes have delivered.

A process of the role forward reads the states of its endpoints and stores its counts every few seconds, on one thread.
So sending a message needs no statement in the application's database. A disabled endpoint is no paused group: an
operator pauses groups for other reasons too, and `outbox_group resume` would enable the endpoint.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from django.db import connections, router, transaction
from django.db.models import F, QuerySet
from django.db.models.functions import Now

from outbox.broker.operations.conditions import Concern, Declarations, Judged, Place, Remedy, Severity, Shown
from outbox.broker.operations.state import BrokerState
from outbox.contrib.django.settings.conf import settings_of
from outbox.contrib.forwarding.models import ForwardEndpoint
from outbox.contrib.forwarding.settings import ForwardSettings
from outbox.contrib.forwarding.sinks.sink import EarlierNotAcknowledged, EndpointGone, NotAcknowledged, Rejected
from outbox.errors import ServiceUnavailable, UsageError
from outbox.utils.faults import point
from outbox.utils.safe_text import for_people, shown_text

logger = logging.getLogger(__name__)

# A process stores its counts and reads the states at this interval. So an endpoint that an operator has enabled gets
# messages again after about twice this time.
SYNC_SECONDS: Final = 2.0
_LONGEST_ERROR: Final = 500

# The texts of `last_status`.
DELIVERED: Final = "delivered"
_STATUSES: Final[Sequence[tuple[type[Exception], str]]] = (
    (EndpointGone, "gone"),
    (ServiceUnavailable, "unavailable"),
    (Rejected, "rejected"),
    (NotAcknowledged, "not acknowledged"),
)
_OTHER_STATUS: Final = "failed"


def _rows() -> QuerySet[ForwardEndpoint]:
    return ForwardEndpoint.objects.using(router.db_for_write(ForwardEndpoint))


def list_endpoints() -> list[ForwardEndpoint]:
    """Return the endpoints that a process of the role forward has ever served, by name."""
    return list(_rows().order_by("group"))


def find_endpoint(group: str) -> ForwardEndpoint:
    """Return one endpoint. Raises UsageError with the names of the known endpoints."""
    known = {one.group: one for one in list_endpoints()}
    if group in known:
        return known[group]
    raise UsageError(
        f"there is no endpoint {group!r}; known endpoints: {', '.join(known) or 'none'}. `outbox_worker --role "
        "forward` stores an endpoint when it starts: run it, or correct the name."
    )


def enable(group: str) -> bool:
    """Enable a disabled endpoint. Return False if it is not disabled any more."""
    found = _rows().filter(group=group, disabled_at__isnull=False)
    return bool(found.update(disabled_at=None, disabled_reason="", generation=F("generation") + 1))


CONDITIONS: Final = Declarations[BrokerState]()


@CONDITIONS.declare(
    meaning="An endpoint of FORWARD says that it exists no more, so it gets no messages. Its messages wait.",
    next_step="If the endpoint exists again, run `outbox_endpoint enable GROUP`. If it is gone for good, remove its "
    "entry from FORWARD, then run `outbox_group delete GROUP`.",
    concern=Concern.WITHIN_DAYS,
    shown=Shown(
        listed=Place("endpoints", "Endpoints", {"state": "=disabled"}),
        mark="endpoint disabled",
        remedies=(Remedy("enable_endpoint", "Enable {group} …", "good", {"group": "group"}),),
    ),
)
def endpoint_disabled(state: BrokerState) -> Iterator[Judged]:
    """A project without FORWARD needs no query."""
    if declared := settings_of(ForwardSettings).forward:
        for one in _rows().filter(group__in=declared, disabled_at__isnull=False).order_by("disabled_at"):
            fact = {"group": one.group, "since": str(one.disabled_at), "error": one.disabled_reason}
            yield Severity.WARNING, fact


# -- in a process that forwards --------------------------------------------------------------------


@dataclass(slots=True)
class _Seen:
    """What a process has seen of one endpoint since it last stored its counts."""

    delivered: int = 0
    failed: int = 0
    status: str = ""
    error: str = ""
    # Generation and text of an answer that disables the endpoint.
    gone: tuple[int, str] | None = None

    def with_earlier(self, earlier: _Seen) -> _Seen:
        """Return both together."""
        return _Seen(
            delivered=self.delivered + earlier.delivered,
            failed=self.failed + earlier.failed,
            status=self.status or earlier.status,
            error=self.error or earlier.error,
            gone=self.gone or earlier.gone,
        )


@dataclass(slots=True)
class StoredEndpoint:
    """One endpoint in this process. Implements outbox.contrib.forwarding.sinks.forwarder.Endpoint."""

    group: str
    wake: threading.Event
    lock: threading.Lock = field(default_factory=threading.Lock)
    seen: _Seen = field(default_factory=_Seen)
    generation: int = 0
    # Why the endpoint gets no messages now, or ''.
    closed: str = "its state has not been read from the application's database yet"

    def admit(self) -> int:
        """Return the generation of the endpoint. Raises ServiceUnavailable while the endpoint gets no messages."""
        with self.lock:
            if self.closed:
                raise ServiceUnavailable(
                    f"endpoint {self.group} gets no messages: {self.closed}", pause_seconds=SYNC_SECONDS
                )
            return self.generation

    def record(self, generation: int, results: Sequence[Exception | None]) -> None:
        """Count the results of one call of the sink. EndpointGone closes the endpoint in this process at once."""
        errors = [error for error in results if error is not None and not isinstance(error, EarlierNotAcknowledged)]
        with self.lock:
            seen = self.seen
            seen.delivered += results.count(None)
            seen.failed += len(errors)
            if not errors:
                seen.status = DELIVERED
                return
            last = errors[-1]
            seen.status = next((text for kind, text in _STATUSES if isinstance(last, kind)), _OTHER_STATUS)
            # PostgreSQL stores no NUL character.
            seen.error = for_people(shown_text(last))[:_LONGEST_ERROR]
            if isinstance(last, EndpointGone):
                seen.gone = (generation, seen.error)
                self.closed = f"{seen.error}; `outbox_endpoint enable {self.group}` enables it"
                self.wake.set()


class ForwardEndpoints:
    """The endpoints of this process."""

    def __init__(self, groups: Sequence[str]) -> None:
        self._wake = threading.Event()
        self._of: Final[Mapping[str, StoredEndpoint]] = {group: StoredEndpoint(group, self._wake) for group in groups}

    def of(self, group: str) -> StoredEndpoint:
        """The endpoint of a group."""
        return self._of[group]

    def sync(self) -> None:
        """Store what this process has seen, and read the states.

        If the database refuses this, the next call stores what this call has not stored. Raises Django's DatabaseError.
        """
        taken: dict[str, _Seen] = {}
        for group, one in self._of.items():
            with one.lock:
                taken[group], one.seen = one.seen, _Seen()
        try:
            if any(seen.gone is not None for seen in taken.values()):
                point("forward.before_disabled")
            rows = self._stored(taken)
        except BaseException:
            for group, one in self._of.items():
                with one.lock:
                    one.seen = one.seen.with_earlier(taken[group])
            raise
        for group, one in self._of.items():
            with one.lock:
                if one.seen.gone is None:
                    _apply(one, rows[group])

    @contextmanager
    def in_sync(self) -> Iterator[None]:
        """Call `sync` on a thread, every few seconds and after an endpoint was disabled, until the block ends."""
        stop = threading.Event()
        thread = threading.Thread(target=self._loop, args=[stop], name="outbox-endpoints", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            self._wake.set()
            thread.join()

    def _loop(self, stop: threading.Event) -> None:
        said = ""
        ends = False
        while not ends:
            ends = stop.is_set()
            self._wake.clear()
            try:
                self.sync()
                said = ""
            except Exception as error:
                # Without this thread, the process would never see that an endpoint was enabled or disabled.
                connections[_rows().db].close()
                if shown_text(error) != said:
                    said = shown_text(error)
                    logger.warning(
                        "the states of the endpoints %s cannot be stored and read: %s. Trying again every %g s",
                        *(", ".join(self._of), said.strip(), SYNC_SECONDS),
                    )
            if not ends:
                self._wake.wait(SYNC_SECONDS)
        connections.close_all()

    def _stored(self, taken: Mapping[str, _Seen]) -> dict[str, ForwardEndpoint]:
        rows = _rows()
        with transaction.atomic(using=rows.db):
            # Sorted, so that two processes lock the rows in the same order.
            for group in sorted(self._of):
                if not rows.filter(group=group).exists():
                    rows.bulk_create([ForwardEndpoint(group=group)], ignore_conflicts=True)
                _store(rows.filter(group=group), taken[group])
            return {one.group: one for one in rows.filter(group__in=self._of)}


def _store(row: QuerySet[ForwardEndpoint], seen: _Seen) -> None:
    if seen.status:
        row.update(delivered=F("delivered") + seen.delivered, failed=F("failed") + seen.failed, last_status=seen.status)
    if seen.delivered:
        row.update(last_delivered_at=Now())
    if seen.error:
        row.update(last_error=seen.error, last_error_at=Now())
    if seen.gone is not None:
        generation, text = seen.gone
        row.filter(generation=generation, disabled_at=None).update(disabled_at=Now(), disabled_reason=text)


def _apply(one: StoredEndpoint, row: ForwardEndpoint) -> None:
    one.generation = row.generation
    enabling = f"; `outbox_endpoint enable {one.group}` enables it"
    one.closed = "" if row.disabled_at is None else f"it was disabled: {row.disabled_reason}{enabling}"
