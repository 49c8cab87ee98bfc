"""Log records name the message they are about: the application's while a handler runs, and the framework's own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest

from outbox import Delivery
from outbox.broker import process_log
from outbox.contrib.django import publish, publish_many, subscriber
from outbox.contrib.django.testing import in_memory_outbox
from outbox.errors import PermanentError
from outbox.utils.log_context import FIELDS, PREFIX, MessageFilter
from tests.django.support import consume

pytestmark = pytest.mark.usefixtures("empty_log", "no_subscribers")
shop = logging.getLogger("shop")


class Kept(logging.Handler):
    """Keeps what it is given, as a handler of the project with the filter sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.addFilter(MessageFilter())
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def about(self, text: str) -> dict[str, str]:
        (record,) = (one for one in self.records if text in one.getMessage())
        return {field: getattr(record, PREFIX + field) for field in FIELDS}


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler, root = Kept(), logging.getLogger()
    root.addHandler(handler)
    shop.setLevel(logging.INFO)
    yield handler
    shop.setLevel(logging.NOTSET)
    root.removeHandler(handler)


def test_what_a_handler_logs_names_its_message(kept: Kept) -> None:
    @subscriber("orders", group="effects")
    def effect(delivery: Delivery) -> None:
        shop.info("in %s", delivery.body["number"])

    @subscriber("payments", group="points")
    async def points(delivery: Delivery) -> None:
        await asyncio.sleep(0)
        shop.info("awaited")

    first, second = publish_many("orders", [{"number": 1}, {"number": 2}], key="o1", at_once=True)
    alone = publish("payments", {}, key="p1", at_once=True)
    consume()
    shop.info("outside")
    of_orders = {"transaction_id": str(first.transaction_id), "group": "effects", "topic": "orders", "key": "o1"}
    assert kept.about("in 1") == {"message_id": str(first.message_id), **of_orders}
    assert kept.about("in 2") == {"message_id": str(second.message_id), **of_orders}
    assert first.transaction_id == second.transaction_id != second.message_id
    assert kept.about("awaited") == {
        "message_id": str(alone.message_id),
        "transaction_id": str(alone.transaction_id),
        "group": "points",
        "topic": "payments",
        "key": "p1",
    }
    assert set(kept.about("outside").values()) == {""}


def test_a_batch_names_the_first_few(kept: Kept) -> None:
    @subscriber("orders", group="effects", batch=10)
    def effect(deliveries: list[Delivery]) -> None:
        shop.info("a batch")

    receipts = publish_many("orders", [{}] * 7, key="o1", at_once=True)
    consume()
    found = kept.about("a batch")
    assert found["message_id"] == ",".join([*(str(one.message_id) for one in receipts[:5]), "+2"])
    assert (found["key"], found["transaction_id"]) == ("o1", str(receipts[0].transaction_id))


def test_tests_of_applications_see_the_same(kept: Kept) -> None:
    @subscriber("orders", group="effects")
    def effect(delivery: Delivery) -> None:
        shop.info("in memory")

    with in_memory_outbox() as broker:
        receipt = publish("orders", {}, key="o1", at_once=True)
        broker.drain()
    assert kept.about("in memory")["transaction_id"] == str(receipt.transaction_id)


def test_a_worker_ends_its_lines_with_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "worker.log"
    monkeypatch.setenv(process_log.LOG_FILE_VARIABLE, str(file))
    root = logging.getLogger()
    before = list(root.handlers)
    process_log.write_log("consumer")
    try:

        @subscriber("orders", group="effects")
        def effect(delivery: Delivery) -> None:
            shop.warning("look here")
            raise PermanentError("never")

        receipt = publish("orders", {}, key="o1\x1b[2J", at_once=True)
        consume()
    finally:
        for handler in set(root.handlers).difference(before):
            root.removeHandler(handler)
            handler.close()
    said = file.read_text().splitlines()
    ids = f"message_id={receipt.message_id} transaction_id={receipt.transaction_id}"
    suffix = rf" [{ids} group=effects topic=orders key=o1\x1b[2J]"
    assert [line.endswith(f"shop: look here{suffix}") for line in said if "look here" in line] == [True]
    failed = next(number for number, line in enumerate(said) if "it is given up" in line)
    assert said[failed].endswith(f"it is given up{suffix}")
    assert said[failed + 1].startswith("Traceback")


def test_in_the_log_of_a_project_errors_have_no_control_characters(
    databases: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(logging.Formatter("%(name)s %(message)s"))
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [handler])
    process_log.write_log("consumer")

    @subscriber("orders", group="effects")
    def effect(delivery: Delivery) -> None:
        shop.warning("\x1b[1mof the project itself")
        raise PermanentError("no\x1b[2J such\rorder")

    publish("orders", {}, key="o1", at_once=True)
    consume()
    logging.getLogger("outbox.broker").error("the pass failed: %s", ValueError("\x1b[31mred"))
    said = written.getvalue()
    assert r"PermanentError: no\x1b[2J such\rorder" in said and r"failed: \x1b[31mred" in said
    assert said.count("\x1b") == 1 and "\x1b[1mof the project itself" in said
