"""`python -m outbox.contrib.sqlalchemy install` makes all that a service without Django needs to publish."""

from __future__ import annotations

import os
from collections.abc import Callable

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import create_engine, make_url
from sqlalchemy.orm import Session

from outbox import errors
from outbox.broker.database.executor import Executor
from outbox.broker.log.topics import list_topics
from outbox.broker.schema.grants import Role, missing_rights, role_name
from outbox.contrib.sqlalchemy import Publisher
from outbox.contrib.sqlalchemy.installation import main
from outbox.topic import MessageType
from tests.sqlalchemy.support import url_of


def test_it_installs_declares_and_lets_a_login_publish(
    new_database: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    url, schema, login = new_database(), f"sqla_{os.getpid()}", f"sqla_web_{os.getpid()}"
    arguments = ["install", url_of(url), "--schema", schema, "--topic", "orders:FIFO+DELAY", "--topic", "plain"]
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(login)))
        try:
            assert main(arguments) == 0
            said = f"schema '{schema}' is at version 1\ntopic 'orders' is declared\ntopic 'plain' is declared\n"
            assert capsys.readouterr().out == said
            run = Executor(connection, schema)
            transaction = {MessageType.TRANSACTION}
            assert {topic.name: topic.types for topic in list_topics(run)} == {
                "orders": {MessageType.FIFO, MessageType.DELAY} | transaction,
                "plain": {MessageType.NORMAL} | transaction,
            }
            refuse_to_publish(url, schema, login)
            # Once more, with a login. The other declaration of a topic changes nothing.
            assert main(["install", url_of(url), "--schema", schema, "--topic", "orders", "--publish", login]) == 0
            assert f"topic 'orders' exists\n'{login}' may publish\n" in capsys.readouterr().out
            assert {topic.name for topic in list_topics(run) if topic.is_fifo} == {"orders"}
            publish_as(url, schema, login)
            connection.execute(sql.SQL("SET SESSION AUTHORIZATION {}").format(sql.Identifier(login)))
            assert missing_rights(run, Role.PUBLISH) == []
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(f"SELECT body FROM {schema}.commit_log")
            connection.execute("RESET SESSION AUTHORIZATION")
            assert connection.execute(f"SELECT key FROM {schema}.commit_log").fetchall() == [("A-1",)]
        finally:
            connection.execute("RESET SESSION AUTHORIZATION")
            connection.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE")
            for name in (login, *(role_name(schema, role) for role in Role)):
                if connection.execute("SELECT FROM pg_roles WHERE rolname = %s", [name]).fetchone():
                    connection.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(name)))
                    connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


def publish_as(url: str, schema: str, login: str) -> None:
    engine = create_engine(make_url(url_of(url)).update_query_dict({"options": f"-c role={login}"}))
    try:
        with Session(engine) as session:
            Publisher(schema=schema).publish(session, "orders", {}, key="A-1")
            session.commit()
    finally:
        engine.dispose()


def refuse_to_publish(url: str, schema: str, login: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=r"Let this login publish: .* --publish LOGIN"):
        publish_as(url, schema, login)


def test_what_cannot_be_installed_is_refused_without_a_password(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["postgresql://u:secret@localhost:x/shop"], "this is no URL of PostgreSQL"),
        (["mysql://u:secret@localhost/shop"], "this is no URL of PostgreSQL"),
        (["postgresql://u:secret@localhost:1/shop"], "outbox install: "),
        (["postgresql://localhost/shop", "--topic", "orders:ORDERED"], "'ORDERED' is no type; use NORMAL, FIFO"),
        (["postgresql://localhost/shop", "--topic", "no name"], "topic name 'no name' is not allowed"),
        (["postgresql://localhost/shop", "--schema", "A"], "the broker's schema 'A' is not allowed"),
    ):
        assert main(["install", *arguments]) == 2
        printed = capsys.readouterr()
        assert said in printed.err and "secret" not in printed.err and printed.out == ""
