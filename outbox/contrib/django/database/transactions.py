"""Watches the atomic blocks of a connection, because Django does not see every end of a transaction."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import DatabaseError, InternalError, OperationalError
from psycopg import Connection, pq
from psycopg import Error as DriverError

from outbox.contrib.django.database.database_errors import (
    CONTENDED_MARIADB_NUMBERS,
    LOCK_TIMEOUT_MARIADB_NUMBER,
    mariadb_number,
)
from outbox.contrib.django.database.django_internals import (
    CONNECT,
    WatchedBlocks,
    WatchedWrappers,
    is_test_case,
    rollback_cause,
)
from outbox.errors import TransactionUsageError
from outbox.utils import log_context
from outbox.utils.safe_text import error_line

# Django assumes that a block is one transaction from BEGIN to COMMIT. Application code can end that transaction earlier
# by hand. The later statements of the block then run in another transaction (on SQLite, without a transaction), and the
# earlier writes are already committed or rolled back. A message must not be bound to a block whose transaction was
# ended by hand.
#
# The watch sees every statement that Django's cursors execute. If a statement on the driver's own connection ends the
# transaction, the watch detects that no transaction is open. The watch does not see `ROLLBACK; BEGIN` on the driver's
# connection. To detect these statements, the package reads the ledger row or inbox row again.


# Matches a statement that ends the transaction (not ROLLBACK TO SAVEPOINT). A text with a string constant or a function
# body is not split at its semicolons.
_ENDS: Final = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/)*"
    r"(commit|end|abort|prepare\s+transaction|rollback(?!\s+(?:work\s+|transaction\s+)?to\b))\b",
    re.IGNORECASE | re.DOTALL,
)
# Matches a statement that normally changes at most rows; _LEAVES_SOMETHING matches the exceptions.
_LEAVES_NOTHING: Final = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/|\()*(select|insert|update|delete|merge|with|values|savepoint|release|rollback)\b",
    re.IGNORECASE | re.DOTALL,
)
_LEAVES_SOMETHING: Final = re.compile(r"\bset_config\s*\(|\binto\s+(?:temp|temporary|unlogged|table)\b", re.IGNORECASE)
_QUOTES: Final = re.compile(r"['\"$]")
# MariaDB commits the open transaction before each of these statements.
_ENDS_MARIADB: Final = re.compile(
    r"(?:\s|--[^\n]*\n|#[^\n]*\n|/\*.*?\*/)*"
    r"(commit|rollback(?!\s+(?:work\s+)?to\b)|begin|start\s+transaction|set\s+(?:session\s+|@@)?autocommit|"
    r"(?:create|drop)(?!\s+temporary\b)|alter|truncate|rename|grant|revoke|lock\s+tables?|unlock\s+tables?|"
    r"analyze|optimize|repair|check\s+table|flush|install|uninstall|set\s+password)\b",
    re.IGNORECASE | re.DOTALL,
)
_BEGINS_MARIADB: Final = re.compile(
    r"(?:\s|--[^\n]*\n|#[^\n]*\n|/\*.*?\*/)*"
    r"(?:begin(?!\s+not\s+atomic)|start\s+transaction|set\s+(?:session\s+|@@)?autocommit\s*=\s*(?:0|off))\b",
    re.IGNORECASE | re.DOTALL,
)
# For each vendor: matches a statement that changes the session beyond the transaction.
_CHANGES_SESSION: Final = {
    vendor: re.compile(rf"(?:\s|--[^\n]*\n|/\*.*?\*/|#[^\n]*\n)*(?:{words})", re.IGNORECASE | re.DOTALL)
    for vendor, words in {
        "postgresql": r"set\s+(?!(?:local|transaction|constraints)\b)|reset\b|discard\b|do\b"
        r"|create\s+(?:or\s+replace\s+)?(?:(?:global|local)\s+)?temp(?:orary)?\b(?!.*\bon\s+commit\s+drop\b)",
        "mysql": r"set\s+(?!(?:transaction|statement)\b)|use\b|create\s+(?:or\s+replace\s+)?temporary\b",
        "sqlite": r"pragma\s+[\w.]+\s*=|attach\b|detach\b|create\s+temp(?:orary)?\b",
    }.items()
}
# Matches a call of set_config for the transaction only.
_SET_FOR_TRANSACTION: Final = re.compile(
    r"\bset_config\s*\((?:[^(),']|'[^']*')+,(?:[^(),']|'[^']*'|\([^()]*\))+,\s*true\s*\)", re.IGNORECASE
)
_SET_CONFIG: Final = re.compile(r"\bset_config\s*\(", re.IGNORECASE)
# Statements of Django's ORM begin like this. Except for a call of set_config, they change nothing in the session.
_OF_ORM: Final = (
    *(f"{words} {quote}" for words in ("SELECT", "INSERT INTO", "UPDATE", "DELETE FROM") for quote in '"`'),
    *("SAVEPOINT ", "RELEASE "),
)
# MariaDB: ER_NO_SUCH_TABLE.
_NO_SUCH_TABLE: Final = 1146

# psycopg makes new objects for each reading of `Connection.info.transaction_status`; libpq's own number is free.
_IDLE: Final = pq.TransactionStatus.IDLE
_IN_TRANSACTION: Final = pq.TransactionStatus.INTRANS
_IN_ERROR: Final = pq.TransactionStatus.INERROR


@dataclass(slots=True)
class BlockHalves:
    """The two-phase transactions that one run of an `atomic` block has begun.

    After a look-up, `in_ledger` contains the transactions that have a committed row in the ledger.
    """

    ids: list[UUID] = field(default_factory=list)
    in_ledger: set[UUID] | None = None


@dataclass(slots=True)
class BlockTraces:
    """The effects of a handler's statements that the next handler in the same transaction could notice.

    `lasting`: the handler executed a statement such as SET LOCAL or CREATE TEMPORARY TABLE, whose effect lasts until
    the transaction ends. `has_conflicts`: the database stopped a statement, for example because of a lock timeout.
    `has_key_locks`: the handler published to a FIFO topic or with an option that locks.
    """

    lasting: bool = False
    has_conflicts: bool = False
    has_key_locks: bool = False

    def note(self, text: str) -> None:
        """Record the effects of a statement, or of several with semicolons between them, before they are executed."""
        # A semicolon in a constant also divides the text. Then the part behind it is no known statement.
        parts = [part for part in text.split(";") if part.strip()] if ";" in text else [text]
        if not all(map(_LEAVES_NOTHING.match, parts)) or _LEAVES_SOMETHING.search(text):
            self.lasting = True


class BlockWatch:
    """An execute wrapper of Django that watches the atomic blocks of one connection.

    The wrapper is installed when Django opens the connection. The state of the wrapper belongs to one run of an
    outermost block.
    """

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection = connection
        self._is_mariadb = connection.vendor == "mysql"
        # MariaDB: the driver's connection on which a statement outside of a block has begun a transaction.
        self.begun_on: Any = None
        # The driver's connection whose session a handler has changed.
        self.changed_on: Any = None
        # The number of statements other than SELECT that this connection has executed.
        self.written = 0
        self.begin()

    def begin(self) -> None:
        """Reset the state, because an outermost block begins."""
        # Whether the block has executed a statement, and which statement has ended its transaction by hand.
        self.is_begun = False
        self.ended_by = ""
        self._is_lost = False
        self.bound_to = ""
        self.halves = BlockHalves()
        # Set while several handlers may share the block's transaction; otherwise None.
        self.traces: BlockTraces | None = None

    def __call__(self, execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: dict[str, Any]) -> Any:
        """Check a statement, then execute it (see "Database instrumentation" in Django's documentation)."""
        if not (isinstance(sql, str) and sql.startswith("SELECT")):
            self.written += 1
        is_of_orm = isinstance(sql, str) and sql.startswith(_OF_ORM)
        if not is_of_orm or "set_config" in sql:
            self._note_session(statement_text(sql, self._connection))
        if self._connection.in_atomic_block:
            # A statement of the ORM ends no transaction, unless another statement follows it.
            if (not is_of_orm or ";" in sql) and (word := _ending_statement(sql, self._connection)):
                self._note_end(word)
            self.is_begun = True
            if self.traces is not None:
                return self._traced(self.traces, execute, sql, params, many, context)
            if self._is_mariadb:
                return self._on_mariadb(execute, sql, params, many, context)
        elif self._is_mariadb:
            self._note_outside(sql)
        return execute(sql, params, many, context)

    def _on_mariadb(self, execute: Callable[..., Any], *statement: Any) -> Any:
        """Execute a statement in a block. If it fails, record whether the server has rolled the transaction back.

        After a deadlock, and with innodb_rollback_on_timeout after a lock timeout, MariaDB rolls the whole transaction
        back. The next statement begins a new transaction, and the driver does not see this.
        """
        try:
            return execute(*statement)
        except OperationalError as error:
            number = mariadb_number(error)
            self._is_lost = self._is_lost or number in CONTENDED_MARIADB_NUMBERS
            if number == LOCK_TIMEOUT_MARIADB_NUMBER:
                with self._connection.connection.cursor() as cursor:
                    cursor.execute("SELECT @@innodb_rollback_on_timeout")
                    self._is_lost = self._is_lost or bool(cursor.fetchone()[0])
            raise

    def _note_outside(self, sql: Any) -> None:
        text = statement_text(sql, self._connection)
        if _BEGINS_MARIADB.match(text):
            self.begun_on = self._connection.connection
        elif _ENDS_MARIADB.match(text):
            self.begun_on = None

    def _traced(self, traces: BlockTraces, execute: Callable[..., Any], sql: Any, *rest: Any) -> Any:
        traces.note(statement_text(sql, self._connection))
        try:
            return execute(sql, *rest)
        except (OperationalError, InternalError):
            traces.has_conflicts = True
            raise

    def _note_session(self, text: str) -> None:
        """Record that a handler changes the session. What is set while Django opens the connection stays."""
        if _changes_session(text, self._connection.vendor) and log_context.is_handling() and not _is_being_opened():
            self.changed_on = self._connection.connection

    def note_own(self, text: str) -> None:
        """Record a statement of this package that Django's cursors do not execute, and that ends no transaction."""
        if not text.startswith("SELECT"):
            self.written += 1
        if self._connection.in_atomic_block:
            self.is_begun = True

    def _note_end(self, word: str) -> None:
        if self.bound_to:
            raise TransactionUsageError(
                f"{word} inside atomic() on {self._connection.alias!r} was not executed: it would end the "
                f"transaction of {self.bound_to} before the block does. To commit, leave the block; to roll back, "
                "raise an exception, or use transaction.set_rollback(True)."
            )
        self.ended_by = word

    def bind(self, what: str) -> None:
        """Refuse later statements that end the block's transaction by hand, with `what` in the error text."""
        self.bound_to = self.bound_to or what

    def what_ended(self) -> str:
        """The reason why the block's transaction has ended or cannot commit, or ''.

        Raises psycopg.Error if a statement in a psycopg pipeline has failed.
        """
        if self.ended_by:
            return f"{self.ended_by} was executed by hand inside the block"
        if self._is_lost:
            return "the server rolled the transaction back after a deadlock or a lock timeout"
        raw = self._connection.connection
        if isinstance(raw, Connection):
            if raw.pgconn.pipeline_status:
                sync_pipeline(self._connection)
            status = raw.pgconn.transaction_status
            if status == _IN_ERROR:
                return "a statement in the block failed, and its error was caught, so PostgreSQL will roll back"
            if status == _IDLE and self.is_begun:
                return "the transaction of the block was ended by hand"
        elif self._connection.vendor == "sqlite" and raw is not None and not raw.in_transaction:
            return "the transaction of the block was ended by hand"
        return ""


def _changes_session(text: str, vendor: str) -> bool:
    """Whether a statement, or one of several with semicolons between them, changes the session for later transactions.

    A semicolon in a constant also divides the text, so a statement may count as a change although it is none.
    """
    parts = text.split(";") if ";" in text else (text,)
    pattern = _CHANGES_SESSION.get(vendor)
    if pattern is not None and any(map(pattern.match, parts)):
        return True
    return "set_config" in text.lower() and bool(_SET_CONFIG.search(_SET_FOR_TRANSACTION.sub("", text)))


def _is_being_opened() -> bool:
    """Whether Django opens a connection in this moment, so that the statement belongs to every new connection."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is CONNECT:
            return True
    return False


def is_session_changed(connection: BaseDatabaseWrapper) -> bool:
    """Whether a handler has changed the session of the connection, by a statement of one of Django's cursors."""
    raw = connection.connection
    return raw is not None and any(
        isinstance(wrapper, BlockWatch) and wrapper.changed_on is raw for wrapper in connection.execute_wrappers
    )


def watch_connection(sender: object, connection: BaseDatabaseWrapper, **_: object) -> None:
    """Receiver of Django's signal connection_created: install the watch on a new connection."""
    watch_of(connection)


def watch_of(connection: BaseDatabaseWrapper) -> BlockWatch:
    """The watch of a connection. If the connection has no watch, this function installs one."""
    for wrapper in connection.execute_wrappers:
        if isinstance(wrapper, BlockWatch):
            watch = wrapper
            break
    else:
        watch = BlockWatch(connection)
        if not isinstance(connection.execute_wrappers, WatchedWrappers):
            connection.execute_wrappers = WatchedWrappers(connection)
        # The watch must be the outermost wrapper, so that it also sees the statements of other wrappers.
        connection.execute_wrappers.insert(0, watch)
    if not isinstance(connection.atomic_blocks, WatchedBlocks):
        # Django makes a new list of blocks with every new connection of the driver.
        connection.atomic_blocks = WatchedBlocks(connection, watch.begin)
    return watch


def entered_wrappers(connection: BaseDatabaseWrapper) -> Sequence[Any]:
    """Return the wrappers of the open blocks `execute_wrapper` of a connection, the oldest first."""
    wrappers = connection.execute_wrappers
    return wrappers.entered if isinstance(wrappers, WatchedWrappers) else ()


def leave_wrappers(connection: BaseDatabaseWrapper, known: Container[int]) -> bool:
    """Remove the wrappers of open blocks `execute_wrapper`, except for those whose `id` is known.

    Return whether there was one.
    """
    wrappers = connection.execute_wrappers
    if not isinstance(wrappers, WatchedWrappers):
        return False
    left = [one for one in wrappers.entered if id(one) not in known]
    for wrapper in left:
        wrappers.leave(wrapper)
    return bool(left)


def is_watched(connection: BaseDatabaseWrapper, watch: BlockWatch) -> bool:
    """Whether other code than this package watches the statements: an execute wrapper, or Django's log of queries.

    If so, outbox lets Django execute each statement.
    """
    return connection.execute_wrappers != [watch] or connection.queries_logged


def sync_pipeline(connection: BaseDatabaseWrapper) -> None:
    """Wait until a psycopg pipeline has executed its statements.

    Before the statements are executed, the client does not know the status of the transaction.
    """
    raw = connection.connection
    if isinstance(raw, Connection) and raw.pgconn.pipeline_status:
        with raw.pipeline():
            pass


def in_pipeline(connection: BaseDatabaseWrapper) -> bool:
    """Whether the connection is in a psycopg pipeline, which queues COMMIT and executes it later."""
    raw = connection.connection
    return isinstance(raw, Connection) and bool(raw.pgconn.pipeline_status)


def begun_by_hand(connection: BaseDatabaseWrapper) -> bool:
    """Whether the connection has an open transaction that Django did not begin (BEGIN outside of atomic())."""
    raw = connection.connection
    if connection.in_atomic_block or raw is None:
        return False
    if isinstance(raw, Connection):
        with suppress(DriverError):
            # An error of a statement in the pipeline is ignored here: the application must handle this error, and the
            # transaction status is correct in spite of the error.
            sync_pipeline(connection)
        return raw.pgconn.transaction_status in (_IN_TRANSACTION, _IN_ERROR)
    if connection.vendor == "mysql":
        return watch_of(connection).begun_on is raw
    return connection.vendor == "sqlite" and bool(raw.in_transaction)


def _ending_statement(sql: Any, connection: BaseDatabaseWrapper) -> str:
    text = statement_text(sql, connection)
    parts = text.split(";") if ";" in text and not _QUOTES.search(text) else (text,)
    ends = _ENDS_MARIADB if connection.vendor == "mysql" else _ENDS
    for part in parts:
        if found := ends.match(part):
            return found[1].upper()
    return ""


def statement_text(sql: Any, connection: BaseDatabaseWrapper) -> str:
    """Return a statement as text: a str, bytes, an object of psycopg.sql, or another object."""
    if isinstance(sql, str):
        return sql
    if isinstance(sql, bytes):
        return sql.decode(errors="replace")
    as_string = getattr(sql, "as_string", None)
    return str(sql if as_string is None else as_string(connection.connection))


def lost(connection: BaseDatabaseWrapper, name: str, reason: str) -> TransactionUsageError:
    """The error for a block of this package that cannot commit its work."""
    return TransactionUsageError(
        f"{name} did not fail, but its transaction on {connection.alias!r} cannot commit: {reason}. Nothing is "
        "sent. Put a statement that may fail into an inner atomic(), catch its error only outside of this atomic(), "
        "and do not execute COMMIT or ROLLBACK by hand."
    )


def cause_of_rollback(connection: BaseDatabaseWrapper) -> str:
    """Return the cause why the block is marked for rollback, as a part of a sentence; '' if it is not known."""
    cause = rollback_cause(connection)
    if cause is None:
        return ""
    return f", because of an earlier error: {error_line(cause).rstrip('.')}"


def in_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Whether an atomic block is open on the connection. The block of a TestCase is ignored."""
    return not all(map(is_test_case, connection.atomic_blocks))


def in_test_case(connection: BaseDatabaseWrapper) -> bool:
    """Whether the connection's outermost atomic block belongs to a TestCase, and so never commits."""
    return bool(connection.atomic_blocks) and is_test_case(connection.atomic_blocks[0])


def close_with_blocks(connection: BaseDatabaseWrapper) -> None:
    """Close a connection and forget its open atomic blocks, so that the next statement begins without them."""
    # Django keeps the state of a connection that is closed inside a block.
    connection.in_atomic_block = connection.closed_in_transaction = False
    connection.atomic_blocks = []
    connection.close()


def is_missing_table(error: DatabaseError) -> bool:
    """Whether a statement failed because its table is missing."""
    state = getattr(error.__cause__, "sqlstate", None)
    if state is not None:
        return bool(state == "42P01")
    return mariadb_number(error) == _NO_SUCH_TABLE or "no such table" in str(error)
