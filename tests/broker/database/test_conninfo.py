"""No error and no repr repeats a password, however malformed the connection string is."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from outbox.broker import embedded
from outbox.broker.database.connection import BrokerDatabase, read_conninfo
from outbox.contrib.django.databases import database_from_url
from outbox.contrib.django.settings.conf import OutboxSettings
from outbox.errors import BrokerUnavailable, ConfigurationError
from outbox.utils.safe_text import mask_passwords

MALFORMED = [
    "postgresql://shop:hunter2",
    "postgresql://shop:hunter2/db",
    "postgresql://shop:a@hunter2@host/db",
    "postgresql://shop:a/hunter2@host/db",
    "postgresql://shop:1/hunter2@host/db",
    "postgresql://shop:a?b@hunter2@host/db",
    "postgresql://shop:1?b/hunter2@host/db",
    "postgresql://shop:%zzhunter2@host/db",
    "postgresql://shop:%00hunter2@host/db",
    "postgresql://shop:hunter2@[::1/db",
    "postgresql://shop:hunter2@host/db?nonsense=1",
    "postgresql://shop:hunter2@host:port/db",
    "host=h password=a hunter2",
    "host=h password='a hunter2",
    "host=h password=a hunter2=b",
    'host=h password=a"b hunter2"c',
    "hunter2",
]


def environment_variable(url: str) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(embedded.URL_VARIABLE, url)
        return embedded.server_url(Path("unused"))


WAYS: dict[str, Callable[[str], object]] = {
    "broker": BrokerDatabase,
    "listen": lambda url: BrokerDatabase("dbname=x", listen_conninfo=url),
    "environment": environment_variable,
    "django": database_from_url,
}


def test_a_malformed_connection_string_is_refused_without_being_repeated() -> None:
    for way, url in itertools.product(WAYS, MALFORMED):
        with pytest.raises(ConfigurationError, match=r"postgresql://user:password@host") as caught:
            WAYS[way](url)
        assert "hunter2" not in str(caught.value), (way, url)
        # The text of a traceback, with its causes; without source lines, which contain the test's own parameters.
        for error in (caught.value, caught.value.__cause__):
            assert error is None or "hunter2" not in "".join(traceback.format_exception_only(error)), (way, url)


def test_one_that_can_be_read_is_shown_without_its_password() -> None:
    cases: list[str] = [
        "postgresql://shop:hunter2@127.0.0.1:1/db",
        "postgresql://shop:hunter2%40%2F@127.0.0.1:1/db?sslpassword=hunter2",
        "postgresql://shop:a?hunter2@127.0.0.1:1/db",
        "host=127.0.0.1 port=1 password='hunter2 x' user=shop",
    ]
    for url in cases:
        database = BrokerDatabase(url, listen_conninfo=url)
        assert "hunter2" not in repr(database)
        assert "127.0.0.1" in repr(database)
        assert "hunter2" in database.conninfo
        with pytest.raises(BrokerUnavailable) as caught:
            database.connect()
        assert "hunter2" not in "".join(traceback.format_exception_only(caught.value))
        assert "hunter2" not in str(caught.value.__cause__)


def test_settings_do_not_show_the_listening_connection() -> None:
    assert "hunter2" not in repr(OutboxSettings(listen_url="postgresql://shop:hunter2@host/db"))


def test_what_is_in_order_is_read() -> None:
    cases: list[str] = [
        "",
        "dbname=x",
        "postgresql:///db?host=/tmp/a@b",
        "postgresql://u:@/db",
        "postgresql://u:p@h1:1,h2:2/db",
        "service=x",
    ]
    for text in cases:
        read_conninfo(text, "it")


def test_the_advice_about_a_connection_string_is_readable_after_passwords_are_masked() -> None:
    with pytest.raises(ConfigurationError) as refused:
        read_conninfo("127.0.0.1:5499", "it")
    shown = mask_passwords(str(refused.value))
    assert "%40 for @, %2F for / and %3A for :, as in postgresql://user:***@host:5432/database" in shown


def test_the_error_of_a_direct_connection_names_listen_url(database: BrokerDatabase) -> None:
    away = make_conninfo(database.conninfo, host="/nowhere")
    with pytest.raises(BrokerUnavailable, match="check LISTEN_URL and that"):
        BrokerDatabase(database.conninfo, listen_conninfo=away).open(direct=True)
    with pytest.raises(BrokerUnavailable, match="check the broker's connection settings and that"):
        BrokerDatabase(away).open(direct=True)
