"""`outbox-reconcile archive`: keeps the broker's log as Parquet files before retention removes the messages.

    archive.json                           the passes with their counts and checksums, and the gaps
    message_v1/pass=<name>/day=<date>/…    Parquet, one row per message of the pass that was stored on this day
    timed_out_v1/pass=<name>/…             the messages that timed out in a group while the pass lasted
    state/pass=<name>/…                    at the end of the newest pass: messages that are not settled, dead letters

A pass copies the messages that were settled (decided and due, or recalled) since the previous pass. A message is
settled once, so no message is in two passes. A pass is part of the archive as soon as `archive.json` names the pass. If
a pass was killed, the next pass removes the files of the killed pass.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any, Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from .common.errors import RunIncomplete, UsageProblem, readable_errors
from .common.progress import Progress
from .common.store import Store
from .rules.rule import Rules, SourceKind
from .sources import sql
from .sources.adbc import NAME
from .sources.archived import (
    DEAD,
    FOLDER,
    KINDS,
    MANIFEST,
    SETTLED,
    STATE,
    TIMED_OUT,
    Gap,
    Manifest,
    Pass,
    archived_messages,
    columns_of,
    load_manifest,
    read_passes,
    read_timed_out,
    removed_by_topic,
)
from .sources.base import ColumnKind, released
from .sources.postgres import PostgresSource

_LOCK: Final = "SELECT pg_try_advisory_lock(hashtextextended('outbox-reconcile archive', 0))"
_ABSENT: Final = "\x01"
# The content type of an erased message, as in outbox/erased.py.
_ERASED: Final = "application/vnd.outbox.erased"


class Archive:
    """Runs passes over the broker of a rules file, and erases messages in earlier passes."""

    def __init__(self, spark: SparkSession, rules: Rules, progress: Progress) -> None:
        database = rules.databases[rules.broker]
        if rules.archive is None:
            raise UsageProblem('the rules name no archive: write archive = "/var/lib/outbox-archive" in [broker].')
        if database.kind is not SourceKind.POSTGRES:
            raise UsageProblem(
                f"only a broker of kind 'postgres' can be archived, but the rules read the broker by kind = "
                f"{database.kind.value!r}. Use rules that read the broker's PostgreSQL database."
            )
        self._spark, self._progress, self._schema = spark, progress, database.schema
        self._store = Store(rules.archive)
        # Each pass has a name of its own, so that it ends only its own sessions if another session waits for them.
        self._source = PostgresSource(spark, database, f"{NAME} archive {uuid.uuid4().hex[:6]}")

    def run(self) -> tuple[Pass | None, list[Gap]]:
        """Archive the messages that were settled since the last pass. Return the new pass and the new gaps.

        There is no new pass if no time has passed since the last pass. If the method raises ReconcileError, the archive
        is unchanged.
        """
        with self._locked() as (manifest, until):
            self._progress.say("stage gaps: messages removed since")
            with readable_errors("counting removed messages"):
                gaps = self._account(manifest, until)
            since = manifest.until
            if since is not None and datetime.fromisoformat(until) <= datetime.fromisoformat(since):
                return None, gaps
            manifest.gaps += gaps
            return self._pass(manifest, until), gaps

    @contextmanager
    def _locked(self) -> Iterator[tuple[Manifest, str]]:
        """Open the broker at a snapshot, exclude other passes, and remove what killed passes have left.

        Yields the manifest, and the time before which the state of settled messages cannot change.
        """
        self._store.check_writable()
        if note := self._store.note_of_readers():
            self._progress.say(note)
        with released([self._source]):
            with readable_errors("taking a snapshot"):
                reading = self._source.open([])
                if not self._source.query(_LOCK)[0][0]:
                    raise RunIncomplete("another pass over this broker is running. Start this one after its end.")
            [(broker, waits_since)] = self._source.query(
                f"SELECT broker_id::text, (SELECT min(due_at) FROM {self._table('scheduled')} WHERE queue_id IS NULL) "
                f"FROM {self._table('broker')}",
                about="the broker's id and delayed messages (the archive needs SELECT on its tables broker, scheduled)",
            )
            manifest = load_manifest(self._store) or Manifest(broker=broker)
            # Archives of earlier versions name the broker by its database and server.
            if manifest.broker not in (broker, reading.identity):
                raise UsageProblem(
                    f"{self._store.path(MANIFEST)} is the archive of broker {manifest.broker!r}, but the rules name "
                    f"broker {broker!r}. Give each broker an archive of its own. If it is the archive of this broker "
                    f'from before pg_upgrade or a restore, write "broker": "{broker}" into {MANIFEST}.'
                )
            manifest.broker = broker
            self._remove_unnamed(manifest)
            assert reading.watermark is not None
            yield manifest, min(reading.watermark, waits_since or reading.watermark).isoformat()

    def erase(self, secret: str | None) -> int:
        """Erase the messages in the archive that were erased in the broker, and return their number.

        A pass with such messages is written anew, and is in force as soon as `archive.json` names it; its former files
        are then removed. A state that is older than an erasure is removed too, and the next pass writes a new state.
        `secret` is OUTBOX['ERASURE_SECRET'], by which erased keys are found. Raises UsageProblem if it is missing, if
        there is no archive, or if the broker has no table of erasures.
        """
        with self._locked() as (manifest, _):
            if manifest.until is None:
                raise UsageProblem(f"there is no archive at {self._store.path(MANIFEST)}, so nothing can be erased.")
            view = self._table("erased_v1")
            with readable_errors("reading the erasures of the broker"):
                [[exists]] = self._source.query(f"SELECT to_regclass({sql.text(view)}) IS NOT NULL")
                if not exists:
                    raise UsageProblem(
                        "the broker has no erasures: it lacks the view erased_v1, because no service on it has the app "
                        "outbox.contrib.erasure. Nothing was erased."
                    )
                erased = self._source.query(
                    f"SELECT kind, topic, value, replacement, erased_at FROM {view} WHERE kind <> 'subject'"
                )
            if secret is None and any(row[0] == "key" for row in erased):
                raise UsageProblem(
                    "keys were erased in the broker, and the archive finds their messages by OUTBOX['ERASURE_SECRET']: "
                    "set the environment variable OUTBOX_ERASURE_SECRET to the same text."
                )
            count = sum(self._erase_in(manifest, place, erased, secret or "") for place in range(len(manifest.passes)))
            if any(row[4] >= datetime.fromisoformat(manifest.until) for row in erased):
                manifest.state = ""
            self._write_manifest(manifest)
            self._remove_unnamed(manifest)
            return count

    def _erase_in(self, manifest: Manifest, place: int, erased: list[tuple[Any, ...]], secret: str) -> int:
        each = manifest.passes[place]
        ids = {(topic, value): replacement or "" for kind, topic, value, replacement, _ in erased if kind == "message"}
        keys = {(topic, value): replacement or "" for kind, topic, value, replacement, _ in erased if kind == "key"}
        of_keys = {topic for topic, _ in keys}

        def replacement_of(topic: str, message_id: str, key: str) -> str | None:
            """The text that replaces the key, '' if the key stays, None if the message is not erased."""
            if (topic, message_id) in ids:
                return ids[topic, message_id]
            if topic not in of_keys:
                return None
            data = f"{topic}\x00{key}".encode()
            return keys.get((topic, hmac.new(secret.encode(), data, hashlib.sha256).hexdigest()))

        # A lambda, because Spark would evaluate the annotations of the function.
        find = F.udf(lambda topic, message_id, key: replacement_of(topic, message_id, key), "string")
        found = find("topic", "message_id", "key")
        frame = read_passes(self._spark, [self._store.spark_path(each.folder)]).drop("pass").withColumn("by", found)
        has_key = (F.col("by") != "") & ~F.col("key").startswith("erased:")
        is_new = F.col("by").isNotNull() & ((F.col("content_type") != _ERASED) | has_key)
        count = frame.where(is_new).count()
        changed = {
            "key": F.when(has_key, F.col("by")).otherwise(F.col("key")),
            "content_type": F.lit(_ERASED),
            "headers": F.lit(None).cast("string"),
            "body": F.lit("").cast("binary"),
        }
        is_erased = F.col("by").isNotNull()
        columns = {name: F.when(is_erased, value).otherwise(F.col(name)) for name, value in changed.items()}
        written = frame.withColumns(columns).drop("by")
        timed_out, is_stale = read_timed_out(self._spark, self._store, replace(manifest, passes=[each])), False
        if timed_out is not None:
            # The message of such a row is in this pass, or in an earlier one, which has its erased key already.
            paths = [self._store.spark_path(one.folder) for one in manifest.passes[: place + 1]]
            known = written.select("log_id", "key").unionByName(read_passes(self._spark, paths).select("log_id", "key"))
            known = known.where(F.col("key").startswith("erased:")).dropDuplicates(["log_id"])
            timed_out = timed_out.join(known.withColumnRenamed("key", "by"), "log_id", "left")
            is_stale = not timed_out.where("by <> key").isEmpty()
        if not count and not is_stale:
            return 0
        made = replace(each, name=f"{each.name.partition('.')[0]}.{uuid.uuid4().hex[:6]}")
        self._progress.say(f"stage erase: {count} messages of {each.folder}")
        with readable_errors("erasing messages"):
            self._write_days(written, made.folder)
            if timed_out is not None:
                timed_out = timed_out.withColumn("key", F.coalesce("by", "key")).drop("by")
                timed_out.coalesce(1).write.parquet(self._store.spark_path(f"{TIMED_OUT}/pass={made.name}"))
            messages, checksum = self._sums(made.folder)
        if messages != each.count:
            raise RunIncomplete(
                f"{made.folder} contains {messages} messages, but {each.folder} contains {each.count}. The archive is "
                "unchanged. Repeat the erasure."
            )
        manifest.passes[place] = replace(made, checksum=checksum)
        return count

    def _pass(self, manifest: Manifest, until: str) -> Pass:
        since = manifest.until
        terms = _terms(since, until)
        name = f"{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}-{uuid.uuid4().hex[:6]}"
        folder = f"{FOLDER}/pass={name}"
        self._progress.say(f"stage write: {folder}, settled from {since or 'the beginning'} to {until}")
        with readable_errors("archiving messages"):
            expected, topics = self._expected(terms)
            frame = self._source.read([archived_messages(*terms)], None)
            self._write_days(frame.withColumn("day", F.to_date("stored_at")), folder)
            self._write_timed_out(name, since, until)
            self._write_state(name, until)
        made = Pass(name=name, since=since, until=until, count=expected[0], checksum=expected[1], topics=topics)
        self._progress.say(f"stage verify: {made.count} messages")
        with readable_errors("verifying the archive"):
            found = self._sums(made.folder)
        if found != (made.count, made.checksum):
            raise RunIncomplete(
                f"{made.folder} contains {found[0]} messages with checksum {found[1]}, but {made.count} messages with "
                f"checksum {made.checksum} were read. The archive is unchanged. Run outbox-reconcile archive again."
            )
        manifest.passes.append(made)
        manifest.state = name
        self._progress.say(f"stage publish: {MANIFEST}")
        self._write_manifest(manifest)
        return made

    def _write_manifest(self, manifest: Manifest) -> None:
        content = {"version": 1, **asdict(manifest)}
        self._store.write(MANIFEST, json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    def _account(self, manifest: Manifest, until: str) -> list[Gap]:
        """Return the gaps: messages that retention removed before a pass archived them.

        The first pass finds no gap: it only records the number of messages that retention had removed before.
        """
        gaps = []
        for topic, removed, taken, horizon in removed_by_topic(self._source, self._schema, manifest.until):
            if not manifest.passes:
                manifest.removed[topic] = (removed, horizon.astimezone(UTC).isoformat() if horizon else "")
            elif missing := manifest.missing(topic, removed, taken):
                gaps.append(Gap(topic=topic, messages=missing, until=until))
        return gaps

    def _expected(self, terms: list[str]) -> tuple[tuple[int, int], dict[str, int]]:
        values = ", ".join(f"coalesce({_as_text(name)}, '{_ABSENT}')" for name in KINDS)
        line = f"md5(convert_to(concat_ws('|', {values}), 'UTF8'))"
        number = f"('x' || substr({line}, 1, 15))::bit(60)::bigint"
        rows = self._source.query(
            f"SELECT topic, count(*), bit_xor({number}) FROM {self._table(FOLDER)}{sql.where(terms)} GROUP BY topic",
            about="the broker's view message_v1",
        )
        count, checksum = 0, 0
        for _, messages, part in rows:
            count, checksum = count + int(messages), checksum ^ int(part)
        return (count, checksum), {str(row[0]): int(row[1]) for row in rows}

    def _write_days(self, frame: DataFrame, folder: str) -> None:
        frame.write.partitionBy("day").parquet(self._store.spark_path(folder))

    def _write_timed_out(self, name: str, since: str | None, until: str) -> None:
        terms = [f"timed_out_at < '{until}'"] + ([f"timed_out_at >= '{since}'"] if since is not None else [])
        try:
            found = self._source.query(f"SELECT 1 FROM {self._table(TIMED_OUT)}{sql.where(terms)} LIMIT 1")
        except UsageProblem as error:
            self._progress.say(f"  messages that timed out are not archived ({error}): grant SELECT on timed_out_v1")
            return
        if found:
            frame = self._source.read([replace(columns_of(TIMED_OUT), conditions=tuple(terms))], None)
            frame.coalesce(1).write.parquet(self._store.spark_path(f"{TIMED_OUT}/pass={name}"))

    def _write_state(self, name: str, until: str) -> None:
        """Write what no pass has at the end of this pass: messages that are not settled, and dead letters."""
        open_ones = (
            f"state IN ('undecided', 'parked') OR (state IN ('committed', 'recalled') AND {SETTLED} >= '{until}')"
        )
        wanted = {
            FOLDER: archived_messages(f"({open_ones})"),
            DEAD: replace(columns_of(DEAD), conditions=("replayed_at IS NULL",)),
        }
        for view, selection in wanted.items():
            frame = self._source.read([selection], None)
            frame.coalesce(1).write.parquet(self._store.spark_path(f"{STATE}/pass={name}/{view}"))

    def _table(self, view: str) -> str:
        return sql.table_name(view, self._schema)

    def _sums(self, folder: str) -> tuple[int, int]:
        """The number and the checksum of the messages in a pass's files.

        `_expected` computes the checksum in the broker's database by the same formula.
        """
        parts = [F.coalesce(_as_column(name, kind), F.lit(_ABSENT)) for name, kind in KINDS.items()]
        number = F.conv(F.substring(F.md5(F.concat_ws("|", *parts).cast("binary")), 1, 15), 16, 10).cast("bigint")
        frame = read_passes(self._spark, [self._store.spark_path(folder)])
        row = frame.agg(F.count(F.lit(1)), F.coalesce(F.bit_xor(number), F.lit(0).cast("bigint"))).collect()[0]
        return int(row[0]), int(row[1])

    def _remove_unnamed(self, manifest: Manifest) -> None:
        known = {f"pass={each.name}" for each in manifest.passes}
        for folder, named in ((FOLDER, known), (TIMED_OUT, known), (STATE, {f"pass={manifest.state}"})):
            for name in self._store.folders(folder):
                if name not in named:
                    self._progress.say(f"  removing {folder}/{name}, which the archive does not name")
                    self._store.remove(f"{folder}/{name}")


def _terms(since: str | None, until: str) -> list[str]:
    """Conditions for the messages that were settled from `since` on and before `until`.

    A message is stored before it is settled. So the condition on `stored_at`, which has an index, excludes no message.
    """
    terms = [f"{SETTLED} < '{until}'", f"stored_at < '{until}'", "state IN ('committed', 'recalled')"]
    return terms + ([f"{SETTLED} >= '{since}'"] if since is not None else [])


def _as_text(name: str) -> str:
    kind = KINDS[name]
    if kind is ColumnKind.TIMESTAMP:
        return f"(extract(epoch FROM {name}) * 1000000)::bigint::text"
    return f"md5({name})" if kind is ColumnKind.BINARY else f"{name}::text"


def _as_column(name: str, kind: ColumnKind) -> Column:
    if kind is ColumnKind.TIMESTAMP:
        return F.unix_micros(name).cast("string")
    return F.md5(name) if kind is ColumnKind.BINARY else F.col(name).cast("string")
