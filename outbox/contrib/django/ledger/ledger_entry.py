"""Writes the ledger row of a publish call, which check-back reads later.

One statement writes the row and reads the ledger's id. If your code has set a search path, the publishing connection
may reach another ledger than a new connection of the same alias. The publish call is then refused, because check-back
uses a new connection, without that search path.
"""

from __future__ import annotations

import logging
from contextlib import closing
from typing import Final
from uuid import UUID

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import DatabaseError, IntegrityError, OperationalError, ProgrammingError

from outbox.contrib.django.database.transactions import is_missing_table
from outbox.contrib.django.ledger import ledger
from outbox.contrib.django.ledger.ledger_checker import open_connection
from outbox.errors import ConfigurationError, TransactionAlreadyRolledBack
from outbox.message import Message

logger = logging.getLogger(__name__)

# The oid of the ledger's table, and the ledger's id from the table outbox_ledger_identity. The search path finds each
# of the two tables separately, so both values are compared.
_Ledger = tuple[int | None, UUID]

# The ledgers that a new connection of an alias has reached. An id always names the same ledger, so this set keeps its
# entries until the process ends.
_reachable: Final[set[tuple[str, int | None, int]]] = set()


def enter(connection: BaseDatabaseWrapper, first: Message, *, in_memory: bool) -> tuple[str, UUID]:
    """Write the ledger row of a publish call. Returns the row's `xid` and the ledger's id.

    `first` is the first message of the call; its id is the transaction id. With a broker `in_memory`, check-back uses
    no other connection. Raises TransactionAlreadyRolledBack if the ledger has a tombstone. Raises ConfigurationError if
    the ledger is missing or check-back could not find it. After an exception, the caller must roll back the surrounding
    block.
    """
    alias = connection.alias
    try:
        entered = ledger.insert_committed(connection, first.message_id)
    except IntegrityError as error:
        raise TransactionAlreadyRolledBack(
            f"transaction {first.message_id} (topic {first.topic!r}) already has a ledger row: a check-back decided "
            "that it never committed, or the same message was published before. The surrounding atomic block is "
            "rolled back; run the whole operation again, with a new message."
        ) from error
    except (ProgrammingError, OperationalError) as error:
        if not is_missing_table(error):
            raise
        raise ConfigurationError(
            f"the ledger's tables are missing on {alias!r}: run `manage.py migrate --database={alias}`. "
            f"Nothing was published."
        ) from error
    if entered.ledger_id is None:
        raise ConfigurationError(
            f"the ledger on {alias!r} has no identity (the database was flushed?): run "
            f"`manage.py migrate --database={alias}`. Nothing was published."
        )
    if connection.vendor == "postgresql" and not in_memory:
        # Python hashes the number of an id faster than the id.
        known = (alias, entered.table_oid, entered.ledger_id.int)
        if known not in _reachable and _is_reachable(alias, (entered.table_oid, entered.ledger_id)):
            _reachable.add(known)
    return entered.xid, entered.ledger_id


def _is_reachable(alias: str, entered: _Ledger) -> bool:
    """Whether check-back reaches this ledger; False if this could not be found out."""
    try:
        found = _reached_from_outside(alias)
    except DatabaseError as error:
        # The publish call can continue, because the half message names the ledger in which the row of this call is.
        logger.warning("the ledger of %r could not be read on another connection: %s", alias, error)
        return False
    if found != entered:
        raise ConfigurationError(
            f"the search_path of this connection leads to another ledger than a new connection of {alias!r}, "
            f"which check-back uses. Keep outbox_ledger and outbox_ledger_identity only in one schema that is on "
            f"every search_path (public), or give each schema an alias of its own in DATABASES. Nothing was "
            f"published."
        )
    return True


def _reached_from_outside(alias: str) -> _Ledger | None:
    with closing(open_connection(alias)) as outside, outside.cursor() as cursor:
        # The publishing transaction may have locked the table. Without a lock timeout, the second connection would wait
        # for this transaction.
        cursor.execute("BEGIN; SET LOCAL lock_timeout = '1s'")
        try:
            return ledger.reached(outside)
        except ProgrammingError as error:
            if not is_missing_table(error):
                raise
            return None
