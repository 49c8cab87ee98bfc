"""A process that cannot compare the list of erasures at its start waits, stays live, and handles no erased message."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import psycopg
import pytest
from psycopg import sql

from outbox.contrib.django.database.aliases import alias_conninfo
from outbox.contrib.django.worker.workers import wait_until_prepared
from outbox.contrib.erasure import erasure_list
from outbox.contrib.erasure.broker_rows import Erasure
from outbox.contrib.erasure.erasure_list import ErasureFile
from outbox.errors import OutboxError
from outbox.utils import heartbeat
from tests.django.processes import process
from tests.django.shop.models import Effect
from tests.django.support import sequence
from tests.django.test_forward import place, webhook
from tests.sinks.receiver import Request, keeping, serving
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("databases")

WAITS: Final = "consuming cannot begin yet"
# The processes that compare the list at their start.
ROLES: Final[dict[str, Sequence[str]]] = {
    "consumer": ["-m", "outbox.contrib.django.worker.child", "consumer"],
    "forward": ["-m", "django", "outbox_worker", "--role", "forward"],
}


@contextlib.contextmanager
def refusing(server_url: str, alias: str) -> Iterator[None]:
    """The database of an alias refuses new connections during the block."""
    name = str(psycopg.conninfo.conninfo_to_dict(alias_conninfo(alias))["dbname"])
    with psycopg.connect(server_url, autocommit=True) as admin:
        allow = sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}")
        admin.execute(allow.format(sql.Identifier(name), sql.SQL("false")))
        try:
            yield
        finally:
            admin.execute(allow.format(sql.Identifier(name), sql.SQL("true")))


@pytest.mark.parametrize("role", ["consumer", pytest.param("forward", marks=pytest.mark.slow)])
def test_a_process_waits_for_its_databases_and_then_does_its_work(role: str, server_url: str, tmp_path: Path) -> None:
    """The list has the erasure of a message that the broker has with its body, as after a restore.

    The handler needs only the key of an erased message. Forwarding sends no erased message.
    """
    beats, log, listed = tmp_path / "heartbeat", tmp_path / "log", tmp_path / "erasures"
    got: list[Request] = []
    expected = {"consumer": ["1", "2"], "forward": ["2"]}[role]
    erased = place("1").message_id
    place("2")
    sequence()
    entry = Erasure(kind="message", topic="orders", value=str(erased), reason="request 30", at=datetime.now(UTC))
    erasure_list.append(ErasureFile(str(listed)), [entry])

    def handled() -> list[str]:
        if role == "forward":
            return sorted(json.loads(request.body)["number"] for request in got)
        return sorted(Effect.objects.values_list("number", flat=True))

    def waits_for(alias: str) -> None:
        said = f'"{psycopg.conninfo.conninfo_to_dict(alias_conninfo(alias))["dbname"]}" is not currently accepting'
        eventually(
            lambda: any(WAITS in line and said in line for line in log.read_text().splitlines()),
            within_seconds=60,
            what=log.read_text,
        )
        alive = heartbeat.listen(beats)
        assert (alive.is_alive(within_seconds=30), alive.is_ready, handled()) == (True, False, [])

    with contextlib.ExitStack() as default_away, contextlib.ExitStack() as broker_away, serving(keeping(got)) as port:
        default_away.enter_context(refusing(server_url, "default"))
        broker_away.enter_context(refusing(server_url, "broker"))
        outbox = {
            "ERASURE_LIST": str(listed),
            "ERASURE_SECRET": "of the tests",
            "FORWARD": {"billing": webhook(port)},
        }
        with process(ROLES[role], outbox=outbox, log=log, variables={heartbeat.VARIABLE: str(beats)}) as started:
            waits_for("broker")
            broker_away.close()
            waits_for("default")
            default_away.close()
            eventually(lambda: handled() == expected, within_seconds=60, what=log.read_text)
            assert started.poll() is None, "the same process has waited"
    assert handled() == expected
    assert "erasures were repeated after a restore: {'broker.commit_log': 1}" in log.read_text()


def test_a_process_that_waits_can_be_stopped(
    outbox_settings: Callable[..., None], tmp_path: Path, server_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    outbox_settings(ERASURE_LIST=str(tmp_path / "erasures"), ERASURE_SECRET="of the tests")
    stop = threading.Event()
    with refusing(server_url, "broker"), caplog.at_level(logging.WARNING):
        waiting = threading.Thread(target=wait_until_prepared, args=[stop])
        waiting.start()
        eventually(lambda: WAITS in caplog.text)
        stop.set()
        waiting.join(timeout=20)
    assert not waiting.is_alive()


class Store:
    """A store of the list in another place, which does not answer at first."""

    reads = 0

    def read(self) -> str | None:
        Store.reads += 1
        if Store.reads == 1:
            raise TimeoutError("the store answers too late")
        return ""

    def append(self, lines: str) -> None:
        raise NotImplementedError


def test_a_process_waits_for_the_store_of_the_list(
    outbox_settings: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    outbox_settings(ERASURE_LIST=f"{__name__}.Store", ERASURE_SECRET="of the tests")
    with caplog.at_level(logging.WARNING):
        wait_until_prepared(threading.Event())
    assert (
        WAITS in caplog.text and "(OUTBOX['ERASURE_LIST']) does not answer: the store answers too late" in caplog.text
    )
    assert Store.reads == 2


def test_a_list_that_cannot_be_read_ends_the_process(outbox_settings: Callable[..., None], tmp_path: Path) -> None:
    outbox_settings(ERASURE_LIST=str(tmp_path), ERASURE_SECRET="of the tests")
    with pytest.raises(OutboxError, match="cannot be read"):
        wait_until_prepared(threading.Event())
