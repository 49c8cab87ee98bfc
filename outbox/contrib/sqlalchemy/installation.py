"""`python -m outbox.contrib.sqlalchemy install URL` makes the broker's tables in a database without Django.

… install postgresql+psycopg://owner@host/shop --topic orders:FIFO+DELAY --publish shop_web
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress

import psycopg
from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.log.topics import declare_topics, list_topics
from outbox.broker.schema import grants
from outbox.broker.schema.install import give_rights
from outbox.broker.schema.install import install as install_tables
from outbox.errors import ConfigurationError, OutboxError
from outbox.topic import MessageType, Topic
from outbox.utils.safe_text import for_people


def install(
    url: str | URL, *, schema: str = "outbox", topics: Sequence[Topic] = (), publishers: Sequence[str] = ()
) -> list[str]:
    """Install or upgrade the broker's tables in a database, and return what was done, one line each.

    `url` is that of SQLAlchemy, for a role that owns the tables or may create them. Topics that exist keep their
    declaration. `publishers` are logins of the server, which become members of outbox's role publish; the four roles
    are made if they are missing. A second call changes nothing.

    Raises ConfigurationError, BrokerUnavailable, SchemaError, or psycopg.Error if the role may not do this.
    """
    with BrokerDatabase(_conninfo(url), schema).connect(name="outbox-install", direct=True) as connection:
        done = [f"schema {schema!r} is at version {install_tables(connection, schema)}"]
        run = Executor(connection, schema)
        known = {topic.name for topic in list_topics(run)}
        declare_topics(run, [topic for topic in topics if topic.name not in known])
        done += [f"topic {one.name!r} {'exists' if one.name in known else 'is declared'}" for one in topics]
        if publishers:
            give_rights(run, grants.plan(run, grants.Logins({grants.Role.PUBLISH: publishers})))
            done += [f"{login!r} may publish" for login in publishers]
        return done


def _conninfo(url: str | URL) -> str:
    """Return the URL for libpq, which knows no drivers."""
    with suppress(ArgumentError, ValueError):
        parsed = make_url(url)
        if parsed.get_backend_name() == "postgresql":
            return parsed.set(drivername="postgresql").render_as_string(hide_password=False)
    # Without the URL, which may have a password.
    raise ConfigurationError("this is no URL of PostgreSQL. Pass one like postgresql+psycopg://owner@host/shop.")


def _topic(text: str) -> Topic:
    name, _, types = text.partition(":")
    wanted = (types or MessageType.NORMAL).split("+")
    if unknown := [one for one in wanted if one not in list(MessageType)]:
        raise ConfigurationError(f"topic {name!r}: {unknown[0]!r} is no type; use {', '.join(MessageType)}.")
    return Topic(name=name, types=frozenset({*map(MessageType, wanted), MessageType.TRANSACTION}))


def main(arguments: list[str] | None = None) -> int:
    """Run the command, and print what was done. Return 0, or 2 after an error."""
    parser = argparse.ArgumentParser(prog="python -m outbox.contrib.sqlalchemy")
    command = parser.add_subparsers(required=True).add_parser("install", help="install or upgrade the broker's tables")
    command.add_argument("url", help="SQLAlchemy's URL of the database, for a role that may create the tables")
    command.add_argument("--schema", default="outbox", help="schema of the broker's tables (default: outbox)")
    of_topic = "declare a topic; its types are NORMAL, or such as FIFO+DELAY, and always TRANSACTION; repeatable"
    command.add_argument("--topic", action="append", default=[], metavar="NAME[:TYPES]", help=of_topic)
    of_login = "let a login of the server publish, as a member of the role publish; repeatable"
    command.add_argument("--publish", action="append", default=[], metavar="LOGIN", help=of_login)
    given = parser.parse_args(arguments)
    try:
        topics = [_topic(one) for one in given.topic]
        done = install(given.url, schema=given.schema, topics=topics, publishers=given.publish)
    except (OutboxError, psycopg.Error) as error:
        print(f"outbox install: {for_people(str(error).strip())}", file=sys.stderr)
        return 2
    print("\n".join(map(for_people, done)))
    return 0
