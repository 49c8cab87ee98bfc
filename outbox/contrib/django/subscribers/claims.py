"""The tables outbox_claim and outbox_step: which attempt may run a handler with effects="outside", and its results.

Each function is one short transaction, except `lock` and `end`, which belong to the transaction of
`ClaimedDelivery.finish`. A claim is recognised by its token, never by its time: the time only says when another attempt
may take the message over. All times are times of the database's clock.

See decision 203.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from outbox.contrib.django.database.columns import SQLITE_NOW, stored_uuid
from outbox.contrib.django.database.transactions import begun_by_hand
from outbox.contrib.django.subscribers.inbox import handled_later, unsupported
from outbox.ports import ClaimedElsewhere, Disposition
from outbox.utils.safe_text import shown_text

logger = logging.getLogger(__name__)

# `now`, `later`, `left`: the present time, a time some seconds later, and the seconds until `expires_at`. `newest`: in
# MariaDB under REPEATABLE READ, only a read with a lock sees an inbox row that is newer than the snapshot.
_DIALECTS: Final[Mapping[str, Mapping[str, str]]] = {
    "postgresql": {
        "now": "clock_timestamp()",
        "later": "clock_timestamp() + make_interval(secs => %s)",
        "left": "extract(epoch FROM expires_at - clock_timestamp())::float8",
        "for_update": " FOR UPDATE",
        "skip_locked": " SKIP LOCKED",
        "newest": "",
    },
    "sqlite": {
        "now": SQLITE_NOW,
        "later": "strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', '+' || %s || ' seconds')",
        "left": "(julianday(expires_at) - julianday('now')) * 86400.0",
        **dict.fromkeys(("for_update", "skip_locked", "newest"), ""),
    },
    "mysql": {
        "now": "UTC_TIMESTAMP(6)",
        "later": "UTC_TIMESTAMP(6) + INTERVAL %s SECOND",
        "left": "TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires_at) / 1000000",
        "for_update": " FOR UPDATE",
        "skip_locked": " SKIP LOCKED",
        "newest": " LOCK IN SHARE MODE",
    },
}

_KEY: Final = "consumer_group = %s AND generation = %s AND message_id = %s"

# If another transaction holds the row, the statement waits for the end of this transaction.
_TAKE: Final = """
INSERT INTO outbox_claim AS known
    (consumer_group, generation, message_id, token, claimed_by, claimed_at, expires_at, attempt)
VALUES (%s, %s, %s, %s, %s, {now}, {later}, %s)
ON CONFLICT (consumer_group, generation, message_id) DO UPDATE
SET token = excluded.token, claimed_by = excluded.claimed_by, claimed_at = excluded.claimed_at,
    expires_at = excluded.expires_at, attempt = excluded.attempt
WHERE known.expires_at <= {now}
RETURNING token
"""
_READ_LEFT: Final = f"SELECT {{left}} FROM outbox_claim WHERE {_KEY}"
_IS_HANDLED: Final = f"SELECT 1 FROM outbox_inbox WHERE {_KEY}{{newest}}"
_HELD: Final = f"SELECT 1 FROM outbox_claim WHERE {_KEY} AND token = %s"
_LOCK: Final = f"{_HELD}{{for_update}}"
_END: Final = f"DELETE FROM outbox_claim WHERE {_KEY} AND token = %s"
_RELEASE: Final = f"UPDATE outbox_claim SET expires_at = {{now}} WHERE {_KEY} AND token = %s"
# A claim whose row is locked is in the transaction of `finish` or of a step, and no other attempt can take it over. The
# renewal skips this claim, because waiting for the transaction would delay the renewal of all other claims.
_RENEW: Final = f"""
UPDATE outbox_claim SET expires_at = {{later}} WHERE (consumer_group, generation, message_id) IN (
    SELECT consumer_group, generation, message_id FROM outbox_claim
    WHERE {_KEY} AND token = %s{{for_update}}{{skip_locked}})
"""

_STEP: Final = f"SELECT result FROM outbox_step WHERE {_KEY} AND name = %s"
# The claim is locked until the end of the transaction, so another attempt cannot take the message over meanwhile.
_STORE: Final = f"""
INSERT INTO outbox_step AS known
    (consumer_group, generation, message_id, name, attempt, begun_at, ended_at, result)
SELECT consumer_group, generation, message_id, %s, attempt, {{now}}, {{ended}}, %s
FROM outbox_claim WHERE {_KEY} AND token = %s{{for_update}}
ON CONFLICT (consumer_group, generation, message_id, name) DO UPDATE
SET result = excluded.result, ended_at = excluded.ended_at WHERE known.result IS NULL
RETURNING name
"""

# MariaDB has no condition for the whole ON DUPLICATE KEY UPDATE, so each column has one. It sets the columns in this
# order, and `token` is already the new one below the first. UTC_TIMESTAMP is the time before a wait, so a claim that
# ends during the wait counts as not ended yet.
_TAKE_MARIADB: Final = """
INSERT INTO outbox_claim
    (consumer_group, generation, message_id, token, claimed_by, claimed_at, expires_at, attempt)
VALUES (%s, %s, %s, %s, %s, {now}, {later}, %s)
ON DUPLICATE KEY UPDATE
    token = IF(expires_at <= VALUES(claimed_at), VALUES(token), token),
    claimed_by = IF(token = VALUES(token), VALUES(claimed_by), claimed_by),
    claimed_at = IF(token = VALUES(token), VALUES(claimed_at), claimed_at),
    expires_at = IF(token = VALUES(token), VALUES(expires_at), expires_at),
    attempt = IF(token = VALUES(token), VALUES(attempt), attempt)
RETURNING token
"""
_STORE_MARIADB: Final = f"""
INSERT INTO outbox_step
    (consumer_group, generation, message_id, name, attempt, begun_at, ended_at, result)
SELECT consumer_group, generation, message_id, %s, attempt, {{now}}, {{ended}}, %s
FROM outbox_claim WHERE {_KEY} AND token = %s FOR UPDATE
ON DUPLICATE KEY UPDATE
    ended_at = IF(result IS NULL, VALUES(ended_at), ended_at), result = ifnull(result, VALUES(result))
RETURNING result
"""


@dataclass(frozen=True, slots=True)
class Claim:
    """The claim of one message by one attempt. `token` is 0 until `take` has taken the claim."""

    alias: str
    group: str
    generation: int
    message_id: UUID
    attempt: int
    term_seconds: float
    token: int = 0

    def key(self, connection: BaseDatabaseWrapper) -> list[Any]:
        """The values of the primary key, as the database stores them."""
        return [self.group, self.generation, stored_uuid(connection, self.message_id)]


def holder() -> str:
    """Return the name of this process in the column `claimed_by`, for operators."""
    return f"{socket.gethostname()} {os.getpid()}"


def replace_broken(connection: BaseDatabaseWrapper) -> None:
    """Close the connection if it broke while the handler waited for another system. Django then opens a new one."""
    if connection.connection is not None and not connection.in_atomic_block and not connection.is_usable():
        connection.close()


def take(connection: BaseDatabaseWrapper, claim: Claim) -> int | Disposition | ClaimedElsewhere:
    """Take the claim and return its token.

    If the message is handled already, return SKIPPED. If another claim has not ended, return how long it still lasts.
    """
    with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
        if connection.vendor == "postgresql" and len(connection.atomic_blocks) == 1:
            # The second statement must see the inbox row of an attempt that finished while the first one waited.
            cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        key, token = claim.key(connection), _new_token()
        text = _text(connection, _TAKE_MARIADB if connection.vendor == "mysql" else _TAKE)
        cursor.execute(text, [*key, token, holder(), claim.term_seconds, claim.attempt])
        if cursor.fetchone() == (token,):
            cursor.execute(_text(connection, _IS_HANDLED), key)
            if cursor.fetchone() is None and not handled_later(
                connection, claim.group, claim.generation, [claim.message_id]
            ):
                return token
            transaction.set_rollback(True, using=connection.alias)
            return Disposition.SKIPPED
        cursor.execute(_text(connection, _READ_LEFT), key)
        left = cursor.fetchone()
        return ClaimedElsewhere(max(0.0, float(left[0])) if left else 0.0)


def _new_token() -> int:
    """Return a token that no claim has had. Counting would not do, because the row that counts is deleted at the end.

    If an operator lets a handled message be handled once more, a frozen attempt from before could have the new token.
    """
    return 1 + secrets.randbits(62)


def lock(connection: BaseDatabaseWrapper, claim: Claim) -> bool:
    """In the open transaction, lock the claim. Return False if another attempt has taken the message over."""
    return _found(connection, _LOCK, [*claim.key(connection), claim.token])


def end(connection: BaseDatabaseWrapper, claim: Claim) -> bool:
    """In the open transaction, delete the claim. Return False if the transaction does not have the claim any more."""
    with connection.cursor() as cursor:
        cursor.execute(_END, [*claim.key(connection), claim.token])
        return int(cursor.rowcount) == 1


def is_held(connection: BaseDatabaseWrapper, claim: Claim) -> bool:
    """Return whether the claim still exists, and no other attempt has taken the message over."""
    try:
        return _found(connection, _HELD, [*claim.key(connection), claim.token])
    except Exception as error:
        logger.info("the claim of message %s cannot be read after a failure: %s", claim.message_id, shown_text(error))
        return False


def release(connection: BaseDatabaseWrapper, claim: Claim) -> None:
    """End the term of the claim, so that the next attempt need not wait for it.

    If the database does not answer, the next attempt waits for the term.
    """
    _give_up(connection, claim, _RELEASE)


def delete(connection: BaseDatabaseWrapper, claim: Claim) -> None:
    """Delete a claim whose handler was not called, or whose message the inbox skips from now on.

    If this fails, pruning deletes the claim.
    """
    _give_up(connection, claim, _END)


def _give_up(connection: BaseDatabaseWrapper, claim: Claim, text: str) -> None:
    try:
        replace_broken(connection)
        if begun_by_hand(connection):
            # The handler has executed BEGIN. This transaction never commits.
            connection.close()
        with connection.cursor() as cursor:
            cursor.execute(_text(connection, text), [*claim.key(connection), claim.token])
    except Exception as error:
        logger.info(
            "the claim of message %s ends by itself in %g s: %s",
            claim.message_id,
            claim.term_seconds,
            shown_text(error),
        )


@dataclass(frozen=True, slots=True)
class StoredStep:
    """A row of outbox_step. `result` is None if the step has begun and has no result."""

    result: bytes | None


def find_step(connection: BaseDatabaseWrapper, claim: Claim, name: str) -> StoredStep | None:
    """Return the stored step of this name, or None."""
    with connection.cursor() as cursor:
        cursor.execute(_STEP, [*claim.key(connection), name])
        row = cursor.fetchone()
    return None if row is None else StoredStep(None if row[0] is None else bytes(row[0]))


def store_step(connection: BaseDatabaseWrapper, claim: Claim, name: str, result: bytes | None) -> bool:
    """Store that a step has begun (None) or its result.

    Return False if another attempt has taken the message over, or the step has another result already.
    """
    is_mariadb = connection.vendor == "mysql"
    text = (_STORE_MARIADB if is_mariadb else _STORE).replace("{ended}", "NULL" if result is None else "{now}")
    with transaction.atomic(using=connection.alias):
        row = _row(connection, text, [name, result, *claim.key(connection), claim.token])
    if row is None or not is_mariadb:
        return row is not None
    # MariaDB returns the row also if it has kept its result.
    return (None if row[0] is None else bytes(row[0])) == result


def _found(connection: BaseDatabaseWrapper, text: str, parameters: Sequence[Any]) -> bool:
    return _row(connection, text, parameters) is not None


def _row(connection: BaseDatabaseWrapper, text: str, parameters: Sequence[Any]) -> tuple[Any, ...] | None:
    with connection.cursor() as cursor:
        cursor.execute(_text(connection, text), parameters)
        row: tuple[Any, ...] | None = cursor.fetchone()
        return row


def _text(connection: BaseDatabaseWrapper, text: str) -> str:
    if connection.vendor not in _DIALECTS:
        raise unsupported(connection)
    return text.format(**_DIALECTS[connection.vendor])


# -- renewal ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Renewal:
    """When to renew a claim next, and until when to renew it (time.monotonic)."""

    due: float
    until: float


@dataclass(slots=True)
class Renewals:
    """Renews the claims of this process on one database in one thread, three times in each term.

    Each database has its own thread, so a database that does not answer delays only the claims on this database. The
    thread ends if it wakes and finds no claims. A claim is not renewed after its time limit, so the message of a
    handler that hangs can be taken over.
    """

    alias: str
    _claims: dict[Claim, _Renewal] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _wakes_at: float = 0.0
    thread: threading.Thread | None = None

    @contextmanager
    def of(self, claim: Claim, *, for_seconds: float) -> Iterator[None]:
        """Renew the claim while the block runs, for at most `for_seconds`."""
        now = time.monotonic()
        renewal = _Renewal(now + claim.term_seconds / 3, now + for_seconds)
        with self._changed:
            if self.thread is None:
                self._wakes_at = renewal.due
                thread = threading.Thread(target=self._loop, name=f"outbox-claims-{self.alias}", daemon=True)
                # If the system refuses a thread, the next claim tries again.
                thread.start()
                self.thread = thread
            elif renewal.due < self._wakes_at:
                self._changed.notify_all()
            self._claims[claim] = renewal
        try:
            yield
        finally:
            with self._changed:
                self._claims.pop(claim, None)

    def holds(self, claim: Claim) -> bool:
        """Whether an attempt at the message runs in this process, within its time limit."""
        wanted = (claim.group, claim.generation, claim.message_id)
        now = time.monotonic()
        with self._changed:
            return any(
                (held.group, held.generation, held.message_id) == wanted and now < renewal.until
                for held, renewal in self._claims.items()
            )

    def _loop(self) -> None:
        while True:
            with self._changed:
                if not self._claims:
                    self.thread = None
                    break
                self._wakes_at = min(renewal.due for renewal in self._claims.values())
                self._changed.wait(max(0.0, self._wakes_at - time.monotonic()))
                due = self._take_due(time.monotonic())
            if due:
                self._renew(due)
        with suppress(Exception):
            connections[self.alias].close()

    def _take_due(self, now: float) -> list[Claim]:
        """Return the claims to renew now, and set the next time of each claim that is due."""
        due: list[Claim] = []
        for claim, renewal in self._claims.items():
            if renewal.due <= now:
                renewal.due = now + claim.term_seconds / 3
                if now < renewal.until:
                    due.append(claim)
        return due

    def _renew(self, due: Sequence[Claim]) -> None:
        connection = connections[self.alias]
        try:
            replace_broken(connection)
            for claim in due:
                with connection.cursor() as cursor:
                    parameters = [claim.term_seconds, *claim.key(connection), claim.token]
                    cursor.execute(_text(connection, _RENEW), parameters)
        except Exception as error:
            logger.warning(
                "%d claims on %r could not be renewed, trying again: %s", len(due), self.alias, shown_text(error)
            )
            with suppress(Exception):
                connection.close()


renewals: Final[dict[str, Renewals]] = {}
"""The renewals of this process, by alias."""


def runs_here(claim: Claim) -> bool:
    """Whether an attempt at the message runs in this process.

    A process that got no CPU time for a while, or was frozen, may be given its own message again before it has renewed
    the claim. The term of the claim is then over, although its handler is alive.
    """
    known = renewals.get(claim.alias)
    return known is not None and known.holds(claim)


@contextmanager
def renewed(claim: Claim, *, for_seconds: float) -> Iterator[None]:
    """Renew the claim while the block runs, for at most `for_seconds`."""
    with renewals.setdefault(claim.alias, Renewals(claim.alias)).of(claim, for_seconds=for_seconds):
        yield
