"""`publish` stores a message in the open transaction of a session, by the SQL function `publish_bytes`
(docs/publishing.md#publish-from-sql).

The function is the broker's interface for every client of PostgreSQL. It checks the message, locks the key on FIFO
topics before the position in the log is drawn, and stores message and decision. So the drivers of SQLAlchemy, sync or
async, need no code of their own here, and nothing is kept in the state of a session of the server.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Coroutine, Mapping
from datetime import datetime, timedelta
from typing import Any, Concatenate, Final, ParamSpec
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, event, exc, text
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, SessionTransaction, scoped_session
from sqlalchemy.pool import Pool

from outbox import errors, tracing
from outbox.arguments import key_text, unreadable, wait_of, with_timeout
from outbox.broker.database import notify
from outbox.broker.database.arrays import dump_headers
from outbox.broker.database.statement import check_schema_name
from outbox.broker.log.topics import ALL_TOPICS, known_topic, unknown_topic
from outbox.codec import Codecs
from outbox.errors import InvalidMessage, OutboxError, TransactionRequired, TransactionUsageError, UsageError
from outbox.message import Message, SendReceipt
from outbox.topic import Topic
from outbox.utils.safe_text import error_line, shown_text, shown_value

logger = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")
AnySession = Session | scoped_session[Any]
AnyAsyncSession = AsyncSession | async_scoped_session[Any]

# The casts name the types, because some drivers leave them to the server, and others ask the server for them.
_PUBLISH: Final = """
SELECT {schema}.publish_bytes(
    CAST(:topic AS text), CAST(:body AS bytea), CAST(:content_type AS text),
    key => CAST(:key AS text), tag => CAST(:tag AS text), headers => CAST(CAST(:headers AS text) AS jsonb),
    deliver_at => coalesce(CAST(:deliver_at AS timestamptz),
                           clock_timestamp() + make_interval(secs => CAST(:delay_seconds AS float8))),
    message_id => CAST(CAST(:message_id AS text) AS uuid)
)
"""

# SQLSTATE -> the error of outbox, and the next step. The SQL function itself raises the first four.
_INSTALL: Final = "`python -m outbox.contrib.sqlalchemy install URL`"
_ERRORS: Final[Mapping[str, tuple[type[OutboxError], str]]] = {
    "42704": (errors.UnknownTopic, f"Declare it: {_INSTALL} --topic NAME, or OUTBOX['TOPICS'] of a Django project"),
    "22023": (InvalidMessage, "Correct the message, or the declaration of the topic"),
    "53400": (errors.TopicOverLimit, "Try again later (docs/operations/sizing.md#limits-of-the-backlog)"),
    "55000": (errors.TransactionalMessagesRejected, "Try again once the operator has switched them on"),
    **dict.fromkeys(
        ("3F000", "42P01", "42883"),
        (errors.SchemaError, f"Connect to the database with the broker's tables, or create them: {_INSTALL}"),
    ),
    "42501": (errors.ConfigurationError, f"Let this login publish: {_INSTALL} --publish LOGIN"),
    "25P02": (TransactionUsageError, "Put a statement that may fail into `with session.begin_nested():`"),
}
_AGAIN: Final = "Roll back, then run the whole operation again"

# -- what a transaction of a session has published -------------------------------------------------
#
# Both dictionaries are keyed by transactions of sessions and hold no object that refers to one, so an entry ends with
# its transaction.

# The connections on which an outermost transaction has published, with the statement that wakes the leader.
_published: Final[WeakKeyDictionary[SessionTransaction, dict[Connection, str]]] = WeakKeyDictionary()
# Why a publish call in a transaction or savepoint failed.
_failed: Final[WeakKeyDictionary[SessionTransaction, str]] = WeakKeyDictionary()


@event.listens_for(Session, "before_commit")
def _refuse_after_failure(session: Session) -> None:
    """Refuse the COMMIT of a transaction, or the release of a savepoint, in which a publish call has failed."""
    if _failed and (reason := _failure_in(session)) is not None:
        raise TransactionUsageError(
            f"the transaction of the session was not committed: a publish call in it failed, and its error was caught: "
            f"{reason} Call session.rollback(). To go on without the message, publish it in `with "
            "session.begin_nested():`, and catch the error outside of this block."
        )


def _failure_in(session: Session) -> str | None:
    transaction = session.get_nested_transaction() or session.get_transaction()
    while transaction is not None and transaction not in _failed:
        transaction = transaction.parent
    return None if transaction is None else _failed[transaction]


@event.listens_for(Session, "after_commit")
def _wake_leader(session: Session) -> None:
    """Wake the leader after COMMIT. Without this, it finds the messages within a second.

    A NOTIFY inside of the transaction would make the transactions of all publishers commit one after the other.
    """
    transaction = session.get_transaction()
    for connection, statement in (_published.get(transaction, {}) if transaction is not None else {}).items():
        if connection.in_transaction():
            # A savepoint was released, or the application ends the transaction of its connection itself.
            continue
        try:
            connection.exec_driver_sql(statement)
            connection.commit()
        except Exception as error:
            # The messages are committed, so the caller must not get an error.
            logger.debug("the leader was not woken: %s", shown_text(error))
            with contextlib.suppress(Exception):
                connection.rollback()


# -- publish ---------------------------------------------------------------------------------------


def _awaitable(
    publish: Callable[Concatenate[AnySession, Arguments], SendReceipt],
) -> Callable[Concatenate[AnyAsyncSession, Arguments], Coroutine[Any, Any, SendReceipt]]:
    async def apublish(session: AnyAsyncSession, /, *args: Arguments.args, **named: Arguments.kwargs) -> SendReceipt:
        """Do the same as `publish`, in the transaction of an AsyncSession."""
        if isinstance(session, async_scoped_session):
            session = session()
        if not isinstance(session, AsyncSession):
            raise UsageError(f"apublish: pass an AsyncSession, not {shown_value(session)}; publish takes a Session.")
        return await session.run_sync(publish, *args, **named)

    # For `help` and for editors: the parameters are those of `publish`.
    functools.update_wrapper(apublish, publish, assigned=())
    return apublish


class Publisher:
    """Publishes into the broker of one schema. `publish` and `apublish` of the package are those of `Publisher()`.

    `codecs` encode the bodies: JSON, unless they name a codec for the topic. The processes that handle the messages
    need the same codecs.
    """

    def __init__(self, *, schema: str = "outbox", codecs: Codecs | None = None) -> None:
        self._schema = check_schema_name(schema)
        self._codecs = codecs or Codecs()
        self._publish = text(_PUBLISH.replace("{schema}", schema))
        self._read_topics = text(ALL_TOPICS.on(schema)[0].decode())
        self._wake = notify.announcement(schema, notify.Channel.DECIDED).text.decode()
        # The topics of each database. A pool belongs to one, also if several engines share it.
        self._topics: WeakKeyDictionary[Pool, dict[str, Topic]] = WeakKeyDictionary()
        self.apublish = _awaitable(self.publish)

    def publish(
        self,
        session: AnySession,
        topic: str,
        body: Any,
        *,
        key: object = None,
        tag: str | None = None,
        headers: Mapping[str, str] | None = None,
        delay: float | timedelta | None = None,
        deliver_at: datetime | None = None,
        timeout: float | timedelta | None = None,
        bind_arguments: dict[str, Any] | None = None,
    ) -> SendReceipt:
        """Store one message in the session's transaction and return its receipt, whose `position` is None.

        The message is delivered if and only if this transaction, and each savepoint around the call, commits. A session
        without a transaction begins one. `key` orders messages on FIFO topics; ints and UUIDs are written as text. On
        topics of type DELAY, `delay` (seconds or a timedelta, from now) or `deliver_at` (with a time zone) postpones
        the delivery. `timeout` is the time limit of the message. If the session has several engines, `bind_arguments`
        chooses the broker's, as in `session.connection`.

        Raises UsageError for a message that can never be stored, and BrokerError if it was not stored now. After each
        error, the transaction or savepoint cannot be committed, even if the caller catches the error.
        """
        if isinstance(session, scoped_session):
            session = session()
        if not isinstance(session, Session):
            raise UsageError(f"publish: pass a Session, not {shown_value(session)}; apublish takes an AsyncSession.")
        transaction = _transaction_of(session, topic)
        try:
            encoded, content_type = self._codecs.encode(topic, body)
            try:
                built = Message(
                    topic=topic,
                    body=encoded,
                    content_type=content_type,
                    key="" if key is None else key_text(key),
                    tag="" if tag is None else tag,
                    headers=(headers or {}) if timeout is None else with_timeout(topic, headers, timeout),
                    delay=wait_of(topic, delay, deliver_at),
                    deliver_at=deliver_at,
                )
            except OutboxError:
                raise
            except Exception as error:
                raise unreadable(topic, error) from error
            if (reason := _failure_in(session)) is not None:
                raise TransactionUsageError(
                    f"{_named(built)} was not published: an earlier publish call in the transaction failed: {reason} "
                    "Call session.rollback() first."
                )
            with tracing.publishing([built]) as [traced]:
                connection = self._store(session, traced, bind_arguments)
        except BaseException as error:
            # A text, because the error would keep the transaction alive.
            _failed[transaction] = error_line(error)
            raise
        _published.setdefault(session.get_transaction() or transaction, {})[connection] = self._wake
        return SendReceipt(message_id=built.message_id, transaction_id=built.message_id, topic=topic)

    def _store(self, session: Session, message: Message, bind_arguments: dict[str, Any] | None) -> Connection:
        plain = ("topic", "body", "content_type", "key", "tag", "deliver_at")
        values = {name: getattr(message, name) for name in plain} | {
            "headers": dump_headers(message.headers),
            "delay_seconds": None if message.delay is None else message.delay.total_seconds(),
            "message_id": str(message.message_id),
        }
        try:
            connection = session.connection(bind_arguments)
            _check_connection(connection, message)
            self._check_topic(connection, message)
            connection.execute(self._publish, values)
        except exc.SQLAlchemyError as error:
            raise self._refused(message, error) from error
        return connection

    def _check_topic(self, connection: Connection, message: Message) -> None:
        """Refuse a message for an unknown topic, or of a kind that the topic does not take, without an SQL error.

        The SQL function checks again, so topics are only read when a message seems to be wrong.
        """
        pool = connection.engine.pool
        topic = self._topics.get(pool, {}).get(message.topic)
        if topic is not None:
            with contextlib.suppress(InvalidMessage):
                topic.check_accepts(message, transactional=True)
                return
        read = [known_topic(**row).topic for row in connection.execute(self._read_topics).mappings()]
        self._topics[pool] = topics = {topic.name: topic for topic in read}
        if message.topic not in topics:
            raise unknown_topic(message.topic, topics)
        topics[message.topic].check_accepts(message, transactional=True)

    def _refused(self, message: Message, error: exc.SQLAlchemyError) -> OutboxError:
        """Return the error of outbox for an error of the database, or of a session without a usable transaction."""
        of_driver = getattr(error, "orig", None)
        state = getattr(of_driver, "sqlstate", None) or getattr(of_driver, "pgcode", None)
        unusable = isinstance(error, exc.InvalidRequestError)
        kind, next_step = _ERRORS.get(state or "", (TransactionUsageError if unusable else errors.SendFailed, _AGAIN))
        # asyncpg's own error is the cause of the one that SQLAlchemy makes for it, and has its text only.
        said = shown_text((of_driver and of_driver.__cause__) or of_driver or error).strip().partition("\n")[0]
        return kind(f"{_named(message)} was not published in schema {self._schema!r}: {said}. {next_step}.")


def _named(message: Message) -> str:
    return f"message {message.message_id} for topic {message.topic!r}"


def _transaction_of(session: Session, topic: str) -> SessionTransaction:
    """Return the innermost savepoint or the transaction of the session; begin a transaction if there is none."""
    found = session.get_nested_transaction() or session.get_transaction()
    if found is None and not session.autobegin:
        raise TransactionRequired(
            f"the message for topic {shown_value(topic)} was not published: the session has autobegin=False and no "
            "transaction. Put the write and the publish call into `with session.begin():`."
        )
    return found or session.begin()


def _check_connection(connection: Connection, message: Message) -> None:
    if connection.dialect.name != "postgresql":
        raise errors.NotSupported(
            f"{_named(message)} was not published: the session's database is {connection.dialect.name}, and only in "
            "PostgreSQL the row and the message can share a transaction. Connect the session to the broker's database."
        )
    if getattr(connection.connection.dbapi_connection, "autocommit", False):
        raise TransactionRequired(
            f"{_named(message)} was not published: the connection is in AUTOCOMMIT, so the message would be sent even "
            "if your code fails afterwards. Use a session whose engine has another isolation level."
        )
    if _is_idle(connection):
        # The drivers send BEGIN with the first statement of a transaction.
        connection.exec_driver_sql("SELECT 1")
        if _is_idle(connection):
            raise TransactionRequired(
                f"{_named(message)} was not published: the session's transaction has ended in the database, by a "
                "COMMIT or ROLLBACK that was executed as a statement. Call session.commit() or session.rollback()."
            )


def _is_idle(connection: Connection) -> bool:
    """Whether the server has told the driver that no transaction is open.

    Only for drivers that do not look at this before each statement, as psycopg 3 does, and send no second BEGIN.
    """
    driver: Any = connection.connection.driver_connection
    if connection.dialect.driver == "asyncpg":
        return not driver.is_in_transaction()
    return connection.dialect.driver == "psycopg2" and driver.info.transaction_status == 0
