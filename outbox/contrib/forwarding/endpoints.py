"""The endpoints of OUTBOX['FORWARD']: which of them are disabled.

A process of the role forward reads the states of its endpoints every few seconds, on one thread.
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

from outbox.broker.operations.conditions import Concern, Declarations, Judged, Place, Remedy, Severity, Shown, Symptom
from outbox.broker.operations.state import BrokerState
from outbox.contrib.django.settings.conf import settings_of
from outbox.contrib.forwarding.models import ForwardEndpoint
from outbox.contrib.forwarding.settings import ForwardSettings
from outbox.contrib.forwarding.sinks.sink import EndpointGone
from outbox.errors import ServiceUnavailable, UsageError
from outbox.utils.faults import point
from outbox.utils.safe_text import for_people, shown_text

logger = logging.getLogger(__name__)

# A process reads the states at this interval. So an endpoint that an operator has enabled gets messages again after
# about twice this time.
SYNC_SECONDS: Final = 2.0
_LONGEST_ERROR: Final = 500


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
    meaning="An endpoint of FORWARD has answered that it is gone for good, so its messages wait.",
    next_step="If the endpoint exists again, run `outbox_endpoint enable GROUP`. If it is gone for good, remove its "
    "entry from FORWARD, then run `outbox_group delete GROUP` (docs/forwarding.md#an-endpoint-that-is-gone).",
    concern=Concern.WITHIN_DAYS,
    symptom=Symptom.STOPPED,
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
class StoredEndpoint:
    """One endpoint in this process. Implements outbox.contrib.forwarding.sinks.forwarder.Endpoint."""

    group: str
    wake: threading.Event
    lock: threading.Lock = field(default_factory=threading.Lock)
    generation: int = 0
    # Why the endpoint gets no messages now, or ''.
    closed: str = "its state has not been read from the application's database yet"
    # Generation and text of an answer that disables the endpoint and is not stored yet.
    gone: tuple[int, str] | None = None

    def admit(self) -> int:
        """Return the generation of the endpoint. Raises ServiceUnavailable while the endpoint gets no messages."""
        with self.lock:
            if self.closed:
                raise ServiceUnavailable(
                    f"endpoint {self.group} gets no messages: {self.closed}", pause_seconds=SYNC_SECONDS
                )
            return self.generation

    def disable(self, generation: int, error: EndpointGone) -> None:
        """Close the endpoint in this process at once. The thread that reads the states stores it."""
        # PostgreSQL stores no NUL character.
        text = for_people(shown_text(error))[:_LONGEST_ERROR]
        with self.lock:
            self.gone = (generation, text)
            self.closed = f"{text}; `outbox_endpoint enable {self.group}` enables it"
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
        """Store which endpoints are gone, and read the states.

        If the database refuses this, the next call stores it. Raises Django's DatabaseError.
        """
        gone = {group: one.gone for group, one in self._of.items()}
        if any(gone.values()):
            point("forward.before_disabled")
        rows = _stored(gone)
        for group, one in self._of.items():
            with one.lock:
                # An answer that came meanwhile is stored by the next call.
                if one.gone is gone[group]:
                    one.gone = None
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


def _stored(gone: Mapping[str, tuple[int, str] | None]) -> dict[str, ForwardEndpoint]:
    """Store which endpoints of these groups are gone, and return their rows."""
    rows = _rows()
    with transaction.atomic(using=rows.db):
        # Sorted, so that two processes lock the rows in the same order.
        for group, answer in sorted(gone.items()):
            if not rows.filter(group=group).exists():
                rows.bulk_create([ForwardEndpoint(group=group)], ignore_conflicts=True)
            if answer is not None:
                generation, text = answer
                same = rows.filter(group=group, generation=generation, disabled_at=None)
                same.update(disabled_at=Now(), disabled_reason=text)
        return {one.group: one for one in rows.filter(group__in=gone)}


def _apply(one: StoredEndpoint, row: ForwardEndpoint) -> None:
    one.generation = row.generation
    enabling = f"; `outbox_endpoint enable {one.group}` enables it"
    one.closed = "" if row.disabled_at is None else f"it was disabled: {row.disabled_reason}{enabling}"
