"""Watches the transaction of an atomic block beyond what Django knows of it.

Django assumes that a block is one transaction from BEGIN to COMMIT. Application code can end that transaction earlier
by hand. The rest of the block then runs in another transaction (on SQLite, in none), and earlier writes may be gone, or
already committed. A message must not be bound to such a block.

The watch sees every statement that passes Django's cursors. It also notices a statement on the driver's own
connection if no transaction is open afterwards. The remaining case (`ROLLBACK; BEGIN` on the driver's connection) is
found by reading the ledger or inbox row again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import Atomic
from psycopg import Connection, pq
from psycopg import Error as DriverError

from outbox.errors import TransactionUsageError

# A statement that ends the transaction; ROLLBACK TO SAVEPOINT does not. After a semicolon it is searched only in texts
# that contain no string constant and no function body.
_ENDS: Final = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/)*"
    r"(commit|end|abort|prepare\s+transaction|rollback(?!\s+(?:work\s+|transaction\s+)?to\b))\b",
    re.IGNORECASE | re.DOTALL,
)
_QUOTES: Final = re.compile(r"['\"$]")


@dataclass(slots=True)
class BlockHalves:
    """The half transactions of one run of a block, and, after a look-up, which of them the ledger has."""

    ids: list[UUID] = field(default_factory=list)
    in_ledger: set[UUID] | None = None

    def add(self, transaction_id: UUID) -> None:
        """Add a half transaction; it invalidates the earlier look-up."""
        self.ids.append(transaction_id)
        self.in_ledger = None


class BlockWatch:
    """Watches one connection, as an execute wrapper of Django, installed when the connection is made.

    Its state belongs to one run of an outermost block.
    """

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection = connection
        self.begin()

    def begin(self) -> None:
        """Start with an outermost block."""
        self._started = False
        self._ended = ""
        self._bound_to = ""
        self.halves = BlockHalves()

    def __call__(self, execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: dict[str, Any]) -> Any:
        """See Django's database instrumentation."""
        if self._connection.in_atomic_block:
            word = _ending_statement(sql, self._connection)
            if word:
                self._note_end(word)
            self._started = True
        return execute(sql, params, many, context)

    def note_begun(self) -> None:
        """Note that a statement outside of Django's cursors began the block's transaction."""
        self._started = True

    def _note_end(self, word: str) -> None:
        if self._bound_to:
            raise TransactionUsageError(
                f"{word} inside atomic() on {self._connection.alias!r} was not executed: it would end the "
                f"transaction of {self._bound_to} before the block does. To commit, leave the block; to roll back, "
                "raise an exception, or use transaction.set_rollback(True)."
            )
        self._ended = word

    def bind(self, what: str) -> None:
        """Refuse from now on statements that would end the block's transaction by hand. `what` is for the error."""
        self._bound_to = self._bound_to or what

    def what_ended(self) -> str:
        """Why the block's transaction is no longer whole, or ''."""
        if self._ended:
            return f"{self._ended} was executed by hand inside it"
        raw = self._connection.connection
        if isinstance(raw, Connection):
            status = raw.info.transaction_status
            if status == pq.TransactionStatus.INERROR:
                return "a statement in it failed and the error was swallowed, so PostgreSQL will roll it back"
            if status == pq.TransactionStatus.IDLE and self._started:
                return "its transaction was ended by hand"
        elif self._connection.vendor == "sqlite" and raw is not None and not raw.in_transaction:
            return "its transaction was ended by hand"
        return ""


class _Blocks(list[Atomic]):
    """Django's list of a connection's open atomic blocks; it starts the watch with each outermost block."""

    def __init__(self, watch: BlockWatch) -> None:
        super().__init__()
        self._watch = watch

    def append(self, block: Atomic) -> None:
        if all(is_test_case(outer) for outer in self):
            self._watch.begin()
        super().append(block)


def watch_connection(sender: object, connection: BaseDatabaseWrapper, **_: object) -> None:
    """Receiver of Django's signal connection_created."""
    watch_of(connection)


def watch_of(connection: BaseDatabaseWrapper) -> BlockWatch:
    """The watch of a connection; it is installed if missing."""
    watch = next((item for item in connection.execute_wrappers if isinstance(item, BlockWatch)), None)
    if watch is None:
        watch = BlockWatch(connection)
        # Installed outermost, so that it also sees the statements of other wrappers.
        connection.execute_wrappers.insert(0, watch)
    if not isinstance(connection.atomic_blocks, _Blocks):
        # Django makes a new list with every new connection of the driver.
        blocks = _Blocks(watch)
        blocks.extend(connection.atomic_blocks)
        connection.atomic_blocks = blocks
    return watch


def require_whole(connection: BaseDatabaseWrapper, what: str) -> BlockWatch:
    """The watch of a block whose transaction is still the one it began with.

    Otherwise it marks the block for rollback and raises TransactionUsageError: `what` was not done.
    """
    watch = watch_of(connection)
    if connection.needs_rollback:
        raise TransactionUsageError(
            f"{what} was not done: the atomic block on {connection.alias!r} is marked for rollback, as after an "
            "error that was caught in it. Let that error leave the block, or put the code that may fail into an "
            "inner atomic()."
        )
    try:
        sync_pipeline(connection)
        reason = watch.what_ended()
    except DriverError as error:
        reason = f"a statement in its pipeline failed ({str(error).strip()})"
    if reason:
        connection.set_rollback(True)
        raise TransactionUsageError(
            f"{what} was not done: the atomic block on {connection.alias!r} has lost its transaction: {reason}. Put a "
            f"statement that may fail into an inner atomic(), and leave COMMIT and ROLLBACK to the block."
        )
    return watch


def sync_pipeline(connection: BaseDatabaseWrapper) -> None:
    """Wait until a psycopg pipeline has executed its statements; before that the transaction's status is not known."""
    raw = connection.connection
    if isinstance(raw, Connection) and raw.pgconn.pipeline_status:
        with raw.pipeline():
            pass


def in_pipeline(connection: BaseDatabaseWrapper) -> bool:
    """Whether COMMIT would be queued instead of executed."""
    raw = connection.connection
    return isinstance(raw, Connection) and bool(raw.pgconn.pipeline_status)


def begun_by_hand(connection: BaseDatabaseWrapper) -> bool:
    """Whether a transaction is open that Django does not know of (BEGIN outside of atomic())."""
    raw = connection.connection
    if connection.in_atomic_block or raw is None:
        return False
    if isinstance(raw, Connection):
        with suppress(DriverError):
            # An error in the pipeline belongs to the application; the status is right nevertheless.
            sync_pipeline(connection)
        return raw.info.transaction_status in (pq.TransactionStatus.INTRANS, pq.TransactionStatus.INERROR)
    return connection.vendor == "sqlite" and bool(raw.in_transaction)


def is_test_case(block: Any) -> bool:
    """Whether this is the block that a TestCase wraps around a test."""
    return bool(block._from_testcase)


def _ending_statement(sql: Any, connection: BaseDatabaseWrapper) -> str:
    text = sql if isinstance(sql, str) else _text(sql, connection)
    parts = text.split(";") if ";" in text and not _QUOTES.search(text) else (text,)
    for part in parts:
        if found := _ENDS.match(part):
            return found[1].upper()
    return ""


def _text(sql: Any, connection: BaseDatabaseWrapper) -> str:
    if isinstance(sql, bytes):
        return sql.decode(errors="replace")
    as_string = getattr(sql, "as_string", None)
    return str(as_string(connection.connection)) if as_string is not None else ""


def lost(connection: BaseDatabaseWrapper, name: str, reason: str) -> TransactionUsageError:
    """The error for a block of this package that cannot commit its work."""
    return TransactionUsageError(
        f"{name} did not fail, but its transaction on {connection.alias!r} cannot commit its work: {reason}. "
        f"Nothing is sent. Put a statement that may fail into an inner atomic(), let errors through, and leave COMMIT "
        f"and ROLLBACK to the block."
    )
