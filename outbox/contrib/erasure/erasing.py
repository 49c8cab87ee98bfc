"""Erase personal data of messages in the broker and in the application's databases (`outbox_erase`).

An erasure first goes to the list of erasures (`erasure_list`), then to the broker's tables, then to the tables of each
alias. If a process dies in between, the next worker that starts repeats the erasure from the list
(`repeat_erasures`). See decision 240.
"""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final
from uuid import UUID

from django.apps import apps
from django.db import connections, models, router, transaction

from outbox import hooks
from outbox.broker.database import timeouts
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.log.topics import TopicCatalog
from outbox.contrib.django.database.aliases import broker_executor
from outbox.contrib.django.ledger.ledger import without_timeouts
from outbox.contrib.django.ledger.ledger_checker import ledger_aliases
from outbox.contrib.django.models import OperatorAction, RaisedCondition, StepEntry
from outbox.contrib.django.operations.personal_data import Rows, Scope, saved
from outbox.contrib.django.settings.conf import for_column, get_settings, settings_of
from outbox.contrib.erasure import broker_rows, erasure_list
from outbox.contrib.erasure.broker_rows import BATCH, Erasable, Erasure, fingerprint
from outbox.contrib.erasure.models import ErasureEntry
from outbox.contrib.erasure.settings import ErasureSettings
from outbox.errors import OutboxError, UsageError

logger = logging.getLogger(__name__)

# A shorter text would also be found inside of words and ids that have nothing to do with the person.
SHORTEST_TEXT: Final = 4
# The stored result of an erased step: `null`, so that the step is not run again.
_NO_RESULT: Final = b"null"

_LOCK: Final = Statement("SELECT pg_advisory_xact_lock(hashtextextended('outbox erasures', 0))")


@dataclass(frozen=True, kw_only=True, slots=True)
class ErasureRequest:
    """What an operator wants to erase: the messages of a topic's key, or messages by their ids.

    `with_key`: the key itself is personal, so it is replaced too. `texts`: personal texts, such as a name or an e-mail
    address; each stored error, finding, note or audit text that contains one of them is changed too.
    """

    topic: str
    key: str | None = None
    message_ids: Sequence[UUID] = ()
    with_key: bool = False
    texts: Sequence[str] = ()

    def check(self) -> None:
        """Raise UsageError if the request contradicts itself."""
        if (self.key is None) == (not self.message_ids):
            raise UsageError("give either --key or --message: one erasure is about one key, or about messages by id.")
        if self.key == "":
            raise UsageError("--key is empty: messages without a key are erased by their ids (--message).")
        if self.with_key and self.key is None:
            raise UsageError("--with-key needs --key: it replaces this key in all messages that have it.")
        if short := [one for one in self.needles if len(one) < SHORTEST_TEXT]:
            raise UsageError(
                f"{short[0]!r} has fewer than {SHORTEST_TEXT} characters, so it would also be found in texts that are "
                "not about the person. Leave out --with-key or this --text."
            )

    @property
    def needles(self) -> list[str]:
        """The texts that are erased wherever they stand."""
        return [*self.texts, *([self.key] if self.with_key and self.key else [])]


@dataclass(slots=True)
class Erased:
    """The result of an erasure: the ids of the messages, and the number of changed rows by database and table."""

    message_ids: list[UUID] = field(default_factory=list)
    rows: Counter[str] = field(default_factory=Counter)


def erase(request: ErasureRequest, *, reason: str, dry_run: bool, now: datetime | None = None) -> Erased:
    """Erase, and return what was erased. With `dry_run`, the same statements are rolled back, and the list stays as is.

    Raises UsageError for a wrong request, UnknownTopic, or OutboxError if the list of erasures cannot be written; then
    nothing was erased.
    """
    request.check()
    if not dry_run:
        _require_reason(reason)
    now = now or datetime.now(UTC)
    secret, store = settings_of(ErasureSettings).erasure_secret, erasure_list.store_of_settings()
    with broker_executor() as run:
        TopicCatalog(run.schema).get(run.connection, request.topic)
        replaced = None
        if request.key is not None:
            # After an earlier erasure, processes may have stored errors of messages whose key it has replaced.
            if secret is not None:
                replaced = broker_rows.replacement_of(
                    run, request.topic, fingerprint(secret, request.topic, request.key)
                )
            keys = [request.key] if replaced is None else [request.key, replaced]
            found = broker_rows.find_keys(run, request.topic, keys)
        else:
            found = broker_rows.find_ids(run, request.topic, request.message_ids)
            missing = set(request.message_ids) - {one.message_id for one in found}
            if missing and store is None:
                raise UsageError(
                    f"topic {request.topic!r} has no message {min(missing)}: check the id and the topic. Retention may "
                    "have removed the message. Nothing was erased."
                )
        entries = list(_entries(request, found, replaced, secret, reason, now))
        if store is not None and not dry_run:
            erasure_list.append(store, entries)
        replacement = entries[0].replacement if entries else None
        result = Erased([one.message_id for one in found])
        with run.connection.transaction(force_rollback=dry_run):
            for part in _parts(found):
                counts = broker_rows.erase(
                    run, request.topic, part, replacement=replacement, patterns=_patterns(request.needles)
                )
                result.rows.update({f"broker.{table}": count for table, count in counts.items()})
            if not dry_run:
                broker_rows.store(run, entries)
    scope = Scope(
        topic=request.topic,
        message_ids=sorted({*(one.message_id for one in found), *request.message_ids}),
        transaction_ids=sorted({one.transaction_id for one in found}),
        key=request.key,
        replacement=replacement,
        texts=request.needles,
    )
    for alias in application_aliases():
        result.rows.update(_erase_on(alias, scope, entries, dry_run=dry_run))
    # After the rows: no message refers to this content any more.
    result.rows.update(_outside_of_tables(scope.message_ids, dry_run=dry_run))
    return result


def _outside_of_tables(message_ids: Sequence[UUID], *, dry_run: bool = False) -> dict[str, int]:
    counts = {name: hooks.resolved(path)(message_ids, dry_run=dry_run) for name, path in hooks.removals.items()}
    return {name: count for name, count in counts.items() if count}


def _require_reason(reason: str) -> None:
    if not reason:
        raise UsageError("--reason is missing: the list of erasures stores the reason. Nothing was erased.")


def _entries(
    request: ErasureRequest,
    found: Sequence[Erasable],
    replaced: str | None,
    secret: str | None,
    reason: str,
    now: datetime,
) -> Iterator[Erasure]:
    replacement = (replaced or f"erased:{uuid.uuid4().hex}") if request.with_key else None
    if request.key is not None and secret is not None:
        value = fingerprint(secret, request.topic, request.key)
        yield Erasure(
            kind="key", topic=request.topic, value=value, replacement=replacement, reason=reason, at=now
        )  # fmt: skip
    for message_id in sorted({*(one.message_id for one in found), *request.message_ids}):
        yield Erasure(
            kind="message",
            topic=request.topic,
            value=str(message_id),
            replacement=replacement,
            reason=reason,
            at=now,
        )


def _parts(found: Sequence[Erasable]) -> Iterator[Sequence[Erasable]]:
    """Return the messages in batches; one empty batch if there are none, for the texts that name no message."""
    for start in range(0, len(found) or 1, BATCH):
        yield found[start : start + BATCH]


def _patterns(texts: Iterable[str]) -> list[str]:
    escaped = (text.replace("\\", r"\\").replace("%", r"\%").replace("_", r"\_") for text in texts)
    return [f"%{text}%" for text in escaped]


# -- the application's tables --------------------------------------------------------------------------


def application_aliases() -> list[str]:
    """Return the aliases that have tables of outbox."""
    return [
        alias
        for alias in ledger_aliases(usable=True)
        if ErasureEntry._meta.db_table in connections[alias].introspection.table_names()
    ]


def _erase_on(alias: str, scope: Scope, entries: Sequence[Erasure], *, dry_run: bool = False) -> dict[str, int]:
    """Erase in the tables of one alias, in one transaction. Return the number of changed rows by table."""
    counts: dict[str, int] = {}
    with transaction.atomic(using=alias), without_timeouts(connections[alias]):
        for model, erase_in in (*_TABLES.items(), *_of_parts()):
            if router.allow_migrate_model(alias, model):
                counts[model._meta.db_table] = erase_in(model._base_manager.using(alias), scope)
        for one in entries:
            ErasureEntry._base_manager.using(alias).update_or_create(
                kind=one.kind, topic=one.topic, value=one.value, defaults={"erased_at": for_column(one.at, alias)}
            )
        if dry_run:
            transaction.set_rollback(True, using=alias)
    return {f"{alias}.{table}": count for table, count in counts.items() if count}


def _steps(rows: Rows, scope: Scope) -> int:
    """Replace the results, because without a row, another attempt would run the step again."""
    mine = rows.filter(message_id__in=scope.message_ids, result__isnull=False)
    return mine.exclude(result=_NO_RESULT).update(result=_NO_RESULT)


def _conditions(rows: Rows, scope: Scope) -> int:
    return saved(
        rows, lambda row: scope.mentions(row.subject), lambda row: {"subject": scope.cleaned(row.subject)}
    )  # fmt: skip


def _audit(rows: Rows, scope: Scope) -> int:
    names = ("why", "subject", "effect", "before", "after")

    def is_about(row: Any) -> bool:
        return any(scope.cleaned(getattr(row, name)) != getattr(row, name) for name in names)

    return saved(rows, is_about, lambda row: {name: scope.cleaned(getattr(row, name)) for name in names})


# outbox_ledger, outbox_inbox, outbox_claim and outbox_key_lock have only ids, hashes and times.
_TABLES: Final[Mapping[type[models.Model], Callable[[Rows, Scope], int]]] = {
    StepEntry: _steps,
    RaisedCondition: _conditions,
    OperatorAction: _audit,
}


def _of_parts() -> Iterator[tuple[type[models.Model], Callable[[Rows, Scope], int]]]:
    for app_label, its in hooks.tables.items():
        for name, path in its.content.items():
            if path is not None:
                yield apps.get_model(app_label, name), hooks.resolved(path)


# -- deleted keys ------------------------------------------------------------------------------------------


def list_of_settings() -> Callable[[str, str, str], None] | None:
    """Return the function that adds the deletion of a key to the list of erasures; None without the list.

    Its arguments are the kind of the key, its id and the reason. It raises OutboxError.
    """
    store = erasure_list.store_of_settings()
    if store is None:
        return None

    def record(kind: str, value: str, reason: str) -> None:
        erasure_list.append(store, [Erasure(kind=kind, value=value, reason=reason, at=datetime.now(UTC))])

    return record


# -- after a restore -----------------------------------------------------------------------------------


def repeat_erasures() -> dict[str, int]:
    """Repeat each erasure of the list that a database does not have, for example because a backup was restored.

    Workers call this function before they consume. Return the number of changed rows by database and table. Without
    OUTBOX['ERASURE_LIST'], nothing is done. Raises OutboxError if the list cannot be read; the worker then must not
    consume.
    """
    store = erasure_list.store_of_settings()
    if store is None:
        return {}
    listed = erasure_list.read(store)
    rows: Counter[str] = Counter()
    for table, its in hooks.deleted_keys.items():
        deleted = hooks.resolved(its.deleted)()
        undone = {UUID(one.value) for one in listed or () if one.kind == "subject"} - (deleted or set())
        if deleted is not None and undone:
            rows[table] += sum(map(hooks.resolved(its.delete), undone))
    if not get_settings().has_database:
        return dict(rows)
    with broker_executor() as run, timeouts.lifted(run.connection):
        # Several workers may start at the same time; the second one finds that all is done.
        run.execute(_LOCK)
        known = broker_rows.done(run)
        if listed is None:
            if known:
                raise OutboxError(
                    "the list of erasures (OUTBOX['ERASURE_LIST']) does not exist, but the broker's table `erased` has "
                    f"{len(known)} erasures. Mount or restore the list. If it is lost, create an empty file: erasures "
                    "that a restored backup has undone are then not repeated."
                )
            return {}
        missing = [one for one in listed if known.get(one.place, _NEVER) < one.at]
        places = {one.place for one in listed}
        new: dict[tuple[str, str, str], Erasure] = {}
        keys: dict[str, set[str]] = {}
        for topic, part in _by_topic(missing).items():
            for again in _again(run, topic, part):
                replacement = again.entry.replacement
                patterns = _patterns([again.key] if again.key is not None and replacement is not None else [])
                for batch in _parts(again.messages):
                    counts = broker_rows.erase(run, topic, batch, replacement=replacement, patterns=patterns)
                    rows.update({f"broker.{table}": count for table, count in counts.items()})
                if again.key is not None and replacement is not None:
                    keys.setdefault(topic, set()).add(again.key)
                found = (replace(again.entry, kind="message", value=str(one.message_id)) for one in again.messages)
                new.update({one.place: one for one in found if one.place not in places})
        if new:
            # Only the restored backup had these messages. The application's tables are erased by the ids of messages.
            erasure_list.append(store, list(new.values()))
        broker_rows.store(run, [*missing, *new.values()])
        for alias in application_aliases():
            rows.update(_repeat_on(alias, [*listed, *new.values()], keys))
    repeated = (*missing, *new.values())
    rows.update(_outside_of_tables([UUID(one.value) for one in repeated if one.kind == "message"]))
    if rows:
        logger.warning("erasures were repeated after a restore: %s", dict(rows))
    return dict(rows)


_NEVER: Final = datetime.min.replace(tzinfo=UTC)


def _by_topic(erasures: Iterable[Erasure]) -> dict[str, list[Erasure]]:
    found: dict[str, list[Erasure]] = {}
    for one in erasures:
        if one.kind != "subject":
            found.setdefault(one.topic, []).append(one)
    return found


@dataclass(frozen=True, slots=True)
class _Again:
    """Stored messages of an erasure that was undone. `key` is their key, if the erasure is about a key."""

    entry: Erasure
    messages: list[Erasable]
    key: str | None = None


def _again(run: Executor, topic: str, erasures: Sequence[Erasure]) -> Iterator[_Again]:
    """Return the stored messages of these erasures."""
    secret = settings_of(ErasureSettings).erasure_secret
    assert secret is not None
    of_keys = {(one.topic, one.value): one for one in erasures if one.kind == "key"}
    for place, key in broker_rows.keys_with(run, secret, of_keys).items():
        one = of_keys[place]
        yield _Again(one, [each for each in broker_rows.find_keys(run, topic, [key]) if each.stored_at <= one.at], key)
    by_replacement: dict[str | None, list[Erasure]] = {}
    for one in erasures:
        if one.kind == "message":
            by_replacement.setdefault(one.replacement, []).append(one)
    for same in by_replacement.values():
        yield _Again(same[0], broker_rows.find_ids(run, topic, [UUID(one.value) for one in same]))


def _repeat_on(alias: str, listed: Sequence[Erasure], keys: Mapping[str, set[str]]) -> Counter[str]:
    known = {
        (one.kind, one.topic, one.value): _aware(one.erased_at) for one in ErasureEntry._base_manager.using(alias).all()
    }
    missing = [one for one in listed if known.get(one.place, _NEVER) < one.at]
    rows: Counter[str] = Counter()
    secret = settings_of(ErasureSettings).erasure_secret
    assert secret is not None
    for topic, erasures in _by_topic(missing).items():
        wanted = {one.value: one for one in erasures if one.kind == "key"}
        ids = [UUID(one.value) for one in erasures if one.kind == "message"]
        texts = sorted(keys.get(topic, ()))
        # For a row whose key is computed, such as a task.
        is_listed = partial(_is_listed, secret, topic, wanted) if wanted else None
        scope = Scope(
            topic=topic,
            message_ids=ids,
            transaction_ids=(),
            key=None,
            replacement=None,
            texts=texts,
            is_listed=is_listed,
        )
        # One transaction, so that the erasures are recorded as done only together with the keys.
        with transaction.atomic(using=alias):
            rows.update(_erase_on(alias, scope, erasures))
            rows.update(_erase_keys_on(alias, topic, secret, wanted))
    return rows


def _erase_keys_on(alias: str, topic: str, secret: str, wanted: Mapping[str, Erasure]) -> Counter[str]:
    """Erase in the tables of parts that have a key. `wanted`: the erasures of keys, by fingerprint."""
    rows: Counter[str] = Counter()
    for model, erase_in in _of_parts() if wanted else ():
        names = {field.name for field in model._meta.fields}
        if "key" not in names or not router.allow_migrate_model(alias, model):
            continue
        keyed = model._base_manager.using(alias)
        stored = keyed.filter(topic=topic) if "topic" in names else keyed.all()
        for key in set(stored.values_list("key", flat=True)):
            if (one := wanted.get(fingerprint(secret, topic, key))) is not None:
                of_key = Scope(
                    topic=topic, message_ids=(), transaction_ids=(), key=key, replacement=one.replacement, texts=()
                )  # fmt: skip
                rows[f"{alias}.{model._meta.db_table}"] += erase_in(stored, of_key)
    return rows


def _is_listed(secret: str, topic: str, wanted: Container[str], key: str) -> bool:
    return fingerprint(secret, topic, key) in wanted


def _aware(moment: datetime) -> datetime:
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
