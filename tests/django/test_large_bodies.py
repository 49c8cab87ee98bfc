"""Large bodies are objects of a storage: a message that may be delivered has its object, and no other object stays."""

from __future__ import annotations

import io
import json
import re
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import pytest
from django.conf import settings as django_settings
from django.core.checks import run_checks
from django.core.files.storage import FileSystemStorage
from django.core.management import call_command
from django.db import connections, transaction
from django.test.utils import override_settings

from outbox import hooks
from outbox.broker.maintenance.retention import run_once as run_retention
from outbox.codec import REFERENCE_CONTENT_TYPE, UnreadBody
from outbox.contrib.django import ClaimedDelivery, message, publish, publish_messages, subscriber
from outbox.contrib.django.engine.broker import engine_of, get_codecs
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.testing import InMemoryOutbox
from outbox.contrib.encryption import Subject
from outbox.contrib.encryption.keys import create_key_table
from outbox.contrib.encryption.models import SubjectKey
from outbox.contrib.forwarding.sinks.formats import format_named
from outbox.contrib.forwarding.sinks.forwarder import Forwarder, RawCodecs
from outbox.contrib.forwarding.sinks.sink import Outgoing
from outbox.contrib.large_bodies import locks
from outbox.contrib.large_bodies.objects import LargeBodyCodec, name_of
from outbox.contrib.large_bodies.orphans import remove_orphans
from outbox.contrib.large_bodies.reference import Reference, unread_body
from outbox.contrib.receiving.sources.source import Incoming, convert
from outbox.errors import (
    BodyTooLarge,
    ConfigurationError,
    HandlerNotStarted,
    InvalidMessage,
    SendFailed,
    UndecodableBody,
    UsageError,
)
from outbox.events import event
from outbox.message import Delivery, Message
from tests.django.broker_world import World, new_world
from tests.django.large_storage import LATER, large_bodies, objects, referred, remove_a_year_later
from tests.django.operators import ALL, bury, client_of, make_user
from tests.django.state import rolled_back
from tests.django.support import call_json, consume, end_messages_lost, sequence
from tests.django.threads import Other

pytestmark = pytest.mark.usefixtures("no_subscribers")

TEXT: Final = "anna.marker@example.org " * 100
LARGE: Final = {"text": TEXT}
ENCODED: Final = json.dumps(LARGE, separators=(",", ":")).encode()


@event("report.made", topic="orders")
@dataclass(frozen=True)
class ReportMade:
    text: str


@pytest.fixture
def folder(tmp_path: Path, outbox_settings: Callable[..., None]) -> Iterator[Path]:
    with large_bodies(tmp_path / "large", outbox_settings) as found:
        yield found


# -- publishing and handling -----------------------------------------------------------------------------------------


def test_a_large_body_is_an_object_and_the_handler_gets_it(path: str, folder: Path) -> None:
    seen: list[Any] = []

    @subscriber("orders", group="plain")
    def plain(delivery: Delivery) -> None:
        with delivery.open_body() as file:
            seen.append((delivery.key, delivery.body, file.read()))

    @subscriber("orders", group="claiming", effects="outside")
    def claiming(delivery: ClaimedDelivery) -> None:
        with delivery.open_body() as file:
            seen.append((delivery.key, delivery.body, file.read()))

    @subscriber("orders", group="together", batch=10, mode="orderly")
    def together(deliveries: list[Delivery]) -> None:
        seen.extend((delivery.key, delivery.body, b"") for delivery in deliveries)

    with transaction.atomic():
        large = publish("orders", LARGE, key="large").message_id
        publish("orders", {"n": 1}, key="small")
    assert publish("orders", LARGE, key="direct", at_once=True).message_id in referred(), (
        "outside of a transaction, too"
    )
    assert set(objects(folder).values()) == {ENCODED}
    assert large in objects(folder) and set(objects(folder)) == referred()
    consume()
    both = [("direct", LARGE, ENCODED), ("large", LARGE, ENCODED), ("small", {"n": 1}, b'{"n":1}')]
    none = [(key, body, b"") for key, body, _ in both]
    assert sorted(seen, key=str) == sorted([*both, *both, *none], key=str)


def test_a_typed_handler_gets_the_event(empty_log: None, folder: Path) -> None:
    seen: list[Any] = []

    @subscriber("orders", group="typed")
    def typed(delivery: Delivery[ReportMade]) -> None:
        seen.append(delivery.body)
        with pytest.raises(UsageError, match="already decoded to an event"):
            delivery.open_body()

    with transaction.atomic():
        publish(ReportMade(text=TEXT))
    consume()
    assert seen == [ReportMade(text=TEXT)]


class NeverUsed(FileSystemStorage):
    """A storage that must not be asked."""

    def exists(self, name: str) -> bool:
        raise AssertionError(name)

    open = save = delete = listdir = exists  # type: ignore[assignment]


def test_a_small_message_costs_no_request_and_no_statement(path: str, outbox_settings: Callable[..., None]) -> None:
    def statements() -> list[str]:
        with connections["default"].execute_wrapper(recorded):
            said.clear()
            with transaction.atomic():
                publish("orders", {"n": 1}, key="small")
        return list(said)

    said: list[str] = []

    def recorded(execute: Any, sql: Any, *rest: Any) -> Any:
        said.append(str(sql))
        return execute(sql, *rest)

    statements()
    before = statements()
    outbox_settings(LARGE_BODIES={"storage": "large"})
    backend = {"BACKEND": f"{__name__}.NeverUsed"}
    with override_settings(STORAGES={**django_settings.STORAGES, "large": backend}):
        statements()
        assert statements() == before


def test_a_large_file_is_read_in_pieces(empty_log: None, folder: Path, outbox_settings: Callable[..., None]) -> None:
    size, peaks = 32 * 1024 * 1024, []
    topics = {"orders": {"codec": "outbox.codec.BytesCodec"}}
    outbox_settings(TOPICS=topics)

    @subscriber("orders", group="streaming")
    def streaming(delivery: Delivery) -> None:
        tracemalloc.start()
        with delivery.open_body() as file:
            count = sum(len(piece) for piece in iter(lambda: file.read(64 * 1024), b""))
        peaks.append((count, tracemalloc.get_traced_memory()[1] < 4 * 1024 * 1024))
        tracemalloc.stop()

    body = bytes(size)
    with pytest.raises(BodyTooLarge, match="large-bodies"):
        Message(topic="orders", body=body)
    with transaction.atomic():
        publish("orders", body)
    del body
    consume()
    assert peaks == [(size, True)]


def test_the_in_memory_broker_has_large_bodies(folder: Path, outbox_settings: Callable[..., None]) -> None:
    seen: list[Any] = []

    @subscriber("orders", group="plain")
    def plain(delivery: Delivery) -> None:
        seen.append(delivery.body)

    outbox_settings(IN_MEMORY=True)
    box = InMemoryOutbox()
    publish("orders", LARGE, at_once=True)
    assert box.bodies("orders") == [LARGE]
    box.drain()
    assert seen == [LARGE] and len(objects(folder)) == 1


# -- faults of the storage -------------------------------------------------------------------------------------------


def dead(world: World) -> list[str]:
    return [error for (error,) in world.sql("SELECT error FROM outbox.dead_letter WHERE replayed_at IS NULL")]


def test_a_missing_or_changed_object_is_a_dead_letter_that_can_be_replayed(
    databases: None, folder: Path, outbox_settings: Callable[..., None]
) -> None:
    seen: list[Any] = []

    @subscriber("orders", group="reading")
    def reading(delivery: Delivery) -> None:
        seen.append(delivery.body["text"])

    with new_world(outbox_settings) as world:
        ids = [publish(ReportMade(text=TEXT), at_once=True).message_id for _ in range(2)]
        gone, changed = (folder / name_of(one) for one in ids)
        content = gone.read_bytes()
        gone.unlink()
        changed.write_bytes(content.replace(b"anna", b"Anna"))
        consume()
        errors = sorted(dead(world))
        assert [error.partition(":")[0] for error in errors] == ["MissingBody", "UndecodableBody"]
        assert str(ids[0]) in errors[0] and "Restore the object, then replay" in errors[0]
        assert str(ids[1]) in errors[1] and "was changed after it was stored" in errors[1]
        assert seen == []
        for place, one in zip((gone, changed), ids, strict=True):
            place.write_bytes(content)
            call_command("outbox_dead_letter", "replay", "reading", str(one), stdout=StringIO())
        consume()
        assert seen == [TEXT, TEXT] and dead(world) == []


class Away(FileSystemStorage):
    """A storage that does not answer."""

    def _open(self, name: str, mode: str = "rb") -> Any:
        raise ConnectionError("the storage is away")

    _save = _open


def test_a_message_waits_while_the_storage_is_away(
    databases: None, folder: Path, outbox_settings: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    @subscriber("orders", group="reading")
    def reading(delivery: Delivery) -> None:
        seen.append((delivery.body, delivery.attempt))

    with new_world(outbox_settings) as world:
        publish("orders", LARGE, at_once=True)
        backend = {"BACKEND": f"{__name__}.Away", "OPTIONS": {"location": str(folder)}}
        with override_settings(STORAGES={**django_settings.STORAGES, "large": backend}):
            with pytest.raises(SendFailed, match="the storage is away"), transaction.atomic():
                publish("orders", LARGE)
            consume()
        assert seen == [] and dead(world) == []
        outbox_settings(LARGE_BODIES=None)
        consume()
        assert seen == [] and dead(world) == [], "a process without the setting cannot read the body, either"
        with monkeypatch.context() as without_the_part:
            without_the_part.delitem(hooks.body_forms, REFERENCE_CONTENT_TYPE)
            outbox_settings(LARGE_BODIES={"storage": "large"})
            consume()
            with pytest.raises(HandlerNotStarted, match="Add the part to INSTALLED_APPS"):
                get_codecs().decode(REFERENCE_CONTENT_TYPE, b"{}")
        assert seen == [] and dead(world) == [], "nor can a process without the part"
        outbox_settings(LARGE_BODIES={"storage": "large"})
        consume()
        assert seen == [(LARGE, 1)]
        assert world.sql("SELECT count(*) FROM outbox.failure") == [(0,)]
        assert world.sql("SELECT count(*) FROM outbox.commit_log") == [(1,)]


# -- orphans ---------------------------------------------------------------------------------------------------------


def test_an_orphan_is_removed_when_it_is_older_than_keep_seconds(empty_log: None, folder: Path) -> None:
    with rolled_back():
        publish("orders", {}, key="rolled back")
        unpublished = message("orders", LARGE).message_id
    assert set(objects(folder)) == {unpublished}
    remove_orphans()
    assert remove_orphans(now=datetime.now(UTC) + timedelta(days=6)).removed == 0
    assert remove_orphans(now=datetime.now(UTC) + timedelta(days=8)).removed == 1
    assert objects(folder) == {}


def test_a_message_in_any_state_keeps_its_object(
    databases: None, folder: Path, outbox_settings: Callable[..., None]
) -> None:
    """Undecided, parked, rolled back, waiting, held, in a queue, retrying, dead, replayed, and handled."""
    with new_world(outbox_settings) as world:
        world.subscribe("mail")
        with end_messages_lost():
            with transaction.atomic():
                publish("orders", LARGE, key="undecided")
            with transaction.atomic():
                publish("orders", LARGE, key="parked")
            with transaction.atomic():
                publish("steps", LARGE, key="held")
        with transaction.atomic():
            publish("steps", LARGE, key="held")
            publish("reminders", LARGE, key="delayed", delay=3600)
            publish("orders", LARGE, key="dead")
            publish("orders", LARGE, key="queued")
        with rolled_back():
            publish("orders", LARGE, key="not asked yet")
        world.sql(
            "INSERT INTO outbox.pending_check (transaction_id, log_id, producer_group, stored_at, immune_until, due_at,"
            " parked_at, park_reason) SELECT transaction_id, log_id, 'shop', now(), now(), now(), now(), 'checks'"
            " FROM outbox.commit_log WHERE key = 'parked'"
        )
        sequence()
        bury(world, "mail", "dead", "ValueError: no")
        [(held, scheduled)] = world.sql(
            "SELECT (SELECT count(*) FROM outbox.held), (SELECT count(*) FROM outbox.scheduled)"
        )
        assert (held, scheduled) == (1, 1)
        assert len(objects(folder)) == 8
        assert set(objects(folder)) == referred()
        assert remove_a_year_later() == 0
        assert set(objects(folder)) == referred()

        # Retention removes what is queued and past the hard cap, and the pass removes exactly the objects of these.
        world.age(3600 * 24 * 365)
        world.sql("UPDATE outbox.topic SET retention_seconds = 1")
        while run_retention(world.run).more:
            pass
        keys = [key for (key,) in world.sql("SELECT key FROM outbox.commit_log ORDER BY key")]
        assert keys == ["dead", "delayed", "held", "held", "not asked yet", "parked", "undecided"]
        assert remove_a_year_later() == 1
        assert set(objects(folder)) == referred()


@contextmanager
def publishing(key: str) -> Iterator[None]:
    """Another thread has published, and its transaction stays open during the block; then it commits."""
    with ThreadPoolExecutor(1) as pool:
        other = Other(pool, lambda: publish("orders", LARGE, key=key))
        assert other.done.wait(60)
        try:
            yield
        finally:
            other.end()


def test_a_transaction_that_is_open_for_a_year_keeps_its_object(path: str, folder: Path) -> None:
    with publishing("long"):
        assert remove_a_year_later() == 0
    assert set(objects(folder)) == referred() and len(referred()) == 1


def test_control_without_the_lock_the_object_of_an_open_transaction_is_lost(
    path: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "hold", lambda *arguments: None)
    monkeypatch.setattr("outbox.contrib.large_bodies.objects.hold", lambda *arguments: None)
    with publishing("long"):
        # A half message is in the log before its transaction commits.
        assert remove_a_year_later() == (1 if path == "atomic" else 0)
    assert len(referred() - set(objects(folder))) == (1 if path == "atomic" else 0)


def test_a_message_whose_object_is_gone_or_that_was_built_long_ago_is_refused(empty_log: None, folder: Path) -> None:
    built = message("orders", LARGE)
    assert remove_a_year_later() == 1
    with pytest.raises(InvalidMessage, match="Build the message again"), transaction.atomic():
        publish_messages([built])
    with pytest.raises(InvalidMessage, match="Build the message again"):
        publish_messages([built], at_once=True)
    old = message("orders", LARGE)
    object.__setattr__(old, "born_at", old.born_at - timedelta(days=4))
    with pytest.raises(InvalidMessage, match=r"96\.0 hours ago"), transaction.atomic():
        publish_messages([old])
    assert referred() == set()


def test_a_turn_goes_on_where_the_last_one_ended(
    empty_log: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.contrib.large_bodies.orphans._BATCH", 2)
    kept = publish("orders", LARGE, at_once=True).message_id
    for _ in range(5):
        message("orders", LARGE)
    later = datetime.now(UTC) + LATER
    remove_orphans()
    turns = [remove_orphans(now=later, max_seconds=0) for _ in range(4)]
    assert [(turn.examined, turn.removed, turn.more) for turn in turns] == [
        (2, 1, True), (2, 2, True), (2, 2, True), (0, 0, False),
    ]  # fmt: skip
    assert set(objects(folder)) == {kept}


def test_another_broker_removes_no_object(path: str, folder: Path) -> None:
    message("orders", LARGE)
    (folder / "outbox" / "foreign").write_bytes(b"not of outbox")
    assert remove_a_year_later() == 1
    owner = folder / "outbox" / "owner"
    owner.write_text("7.1.2")
    message("orders", LARGE)
    with pytest.raises(ConfigurationError, match=r"belong to the broker '7\.1\.2'"):
        remove_orphans(now=datetime.now(UTC) + LATER)
    assert len(objects(folder)) == 1
    owner.unlink()
    assert remove_orphans(now=datetime.now(UTC) + LATER).removed == 0, "the first call only stores the owner"
    assert remove_orphans(now=datetime.now(UTC) + LATER).removed == 1
    assert (folder / "outbox" / "foreign").exists()


# -- erasing and encrypting ------------------------------------------------------------------------------------------


def erase(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = call_json("outbox_erase", *arguments, "--no-input")
    return found


def test_an_erasure_removes_the_object(
    databases: None, folder: Path, outbox_settings: Callable[..., None], tmp_path: Path
) -> None:
    erasing = pytest.importorskip("outbox.contrib.erasure.erasing")
    outbox_settings(ERASURE_LIST=str(tmp_path / "erasures"), ERASURE_SECRET="of the tests")
    erased, kept = (publish("orders", LARGE, key=key, at_once=True).message_id for key in ("4711", "4712"))
    content = objects(folder)[erased]
    planned = erase("orders", "--key", "4711", "--dry-run")
    assert set(objects(folder)) == {erased, kept}
    done = erase("orders", "--key", "4711", "--reason", "request 17")
    assert done["after"]["rows"] == planned["before"]["rows"]
    assert done["after"]["rows"]["storage.large_bodies"] == 1
    assert set(objects(folder)) == {kept} == referred()

    # A restore of the bucket and of the broker brings the object back; an erasure that was cut short leaves it.
    (folder / name_of(erased)).write_bytes(content)
    remove_orphans()
    assert remove_orphans().removed == 1, "at once, because the message is erased"
    (folder / name_of(erased)).write_bytes(content)
    with new_world(outbox_settings) as world:
        world.sql("DELETE FROM outbox.erased")
    assert erasing.repeat_erasures()["storage.large_bodies"] == 1
    assert set(objects(folder)) == {kept}


def test_an_encrypted_body_is_encrypted_in_the_storage(
    databases: None, folder: Path, outbox_settings: Callable[..., None]
) -> None:
    seen: list[Any] = []

    @subscriber("orders", group="reading")
    def reading(delivery: Delivery) -> None:
        seen.append("erased" if delivery.erased else delivery.body)
        delivery.body["text"].upper()

    outbox_settings(KEY_DATABASE="other", KEY_ENCRYPTION_KEYS=["MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="])
    create_key_table("other")
    SubjectKey.objects.using("other").all().delete()
    publish("orders", LARGE, Subject("anna"), at_once=True)
    [content] = objects(folder).values()
    assert b"anna" not in content
    consume()
    publish("orders", LARGE, Subject("anna"), at_once=True)
    call_command("outbox_subject_key", "delete", "anna", "--reason", "a test", "--no-input", stdout=StringIO())
    consume()
    assert seen == [LARGE, "erased"], "an erased message is passed over"


# -- other parts -----------------------------------------------------------------------------------------------------


class Collecting:
    """A sink that keeps what it was given."""

    batch, threads, binding = 10, 1, "http"

    def __init__(self) -> None:
        self.sent: list[Outgoing] = []

    def send(self, messages: Any) -> list[None]:
        self.sent += messages
        return [None for _ in messages]

    def close(self) -> None:
        """Nothing to close."""


def test_a_receiver_gets_the_whole_body_and_a_foreign_reference_is_refused(empty_log: None, folder: Path) -> None:
    stored = message("orders", LARGE, key="k")
    raw = Delivery(message=stored, body=stored.body, group="g", queue="orders/0", offset=0)
    sink = Collecting()
    forms = [format_named(name, binding="http", source="/shop") for name in ("plain", "cloudevents-structured")]
    for form in forms:
        with pytest.raises(HandlerNotStarted, match="The message waits"):
            Forwarder(sink, "there", form)(raw)
        Forwarder(sink, "there", form, LargeBodyCodec(RawCodecs()).unread)(raw)
    assert (sink.sent[0].content_type, sink.sent[0].body) == ("application/json", ENCODED)
    assert json.loads(sink.sent[1].body)["data"] == LARGE
    incoming = Incoming(message_id="1", body=stored.body, where="there", content_type=REFERENCE_CONTENT_TYPE)
    with pytest.raises(InvalidMessage, match="FORWARD of outbox sends the body itself"):
        convert(incoming, "there", "orders")


def test_a_forged_reference_opens_nothing(empty_log: None, folder: Path) -> None:
    named = b'{"name":"secret","size":1,"sha256":"' + b"0" * 64 + b'","content_type":"a"}'
    for body in (b"{}", b"[]", b"x", b"[" * 100_000, named):
        with pytest.raises(UndecodableBody, match=r"not a reference to a large body|not valid"):
            get_codecs().decode(REFERENCE_CONTENT_TYPE, body)


def test_the_page_shows_the_size_and_no_content(
    databases: None, folder: Path, outbox_settings: Callable[..., None]
) -> None:
    with new_world(outbox_settings):
        one = publish("orders", LARGE, at_once=True).message_id
        page = client_of(make_user(*ALL)).get(f"/outbox/messages/{one}/").content.decode()
    assert f"the object {name_of(one)} in the storage of large bodies" in page
    assert "anna.marker" not in page
    assert re.search(r"application/json, 2.?411 bytes\.", page), page


def test_wrong_settings_are_refused(outbox_settings: Callable[..., None]) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"storage": "nowhere"}, "Add the alias to STORAGES"),
        ({"storage": "large", "beyond_bytes": 5 * 1024 * 1024}, "beyond_bytes"),
        ({"storage": "large", "keep_seconds": 60}, "keep_seconds"),
        ({}, "storage"),
    ]
    for declared, said in wrong:
        outbox_settings(LARGE_BODIES=declared)
        assert [one.id for one in run_checks(tags=["outbox"]) if said in one.msg] in (["outbox.E041"], ["outbox.E001"])


def test_rocketmq_refuses_the_setting(outbox_settings: Callable[..., None]) -> None:
    pytest.importorskip("grpc", reason="the client of RocketMQ is not installed: make install-all")
    outbox_settings(BROKER="rocketmq://h:1?brokers=h:2", LARGE_BODIES={"storage": "default"})
    (problem,) = engine_of(get_settings()).check()
    assert problem.id == "outbox.E031" and "OUTBOX['LARGE_BODIES'] needs the bundled broker: outbox does" in problem.msg


def test_a_reading_without_an_end_is_not_verified_and_the_end_is() -> None:
    whole = b"x" * 100_000
    reference = Reference.to(name_of(UUID(int=7 << 76)), "text/plain", whole)

    def reading(content: bytes) -> UnreadBody:
        return unread_body(reference, lambda _: io.BytesIO(content), lambda kind, data: (kind, data))

    assert reading(whole).read() == ("text/plain", whole)
    assert reading(whole[:-1] + b"y").open().read(10) == whole[:10]
    for wrong in (whole[:-1], whole + b"x", whole[:-1] + b"y"):
        with pytest.raises(UndecodableBody, match="was changed"):
            reading(wrong).encoded()
