"""`outbox-reconcile archive`: keeps the broker's log as Parquet files before retention removes the messages.

    archive.json                           the passes with their counts and checksums, and the gaps
    message_v1/pass=<name>/day=<date>/…    Parquet, one row per message of the pass that was stored on this day

A pass copies the messages that were settled (decided and due, or recalled) since the previous pass. A message is
settled once, so no message is in two passes. A pass is part of the archive as soon as `archive.json` names the pass. If
a pass was killed, the next pass removes the files of the killed pass.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import uuid
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from .common.errors import RunIncomplete, UsageProblem, readable_errors
from .common.progress import Progress
from .common.store import Store
from .rules.rule import Rules, SourceKind
from .sources import sql
from .sources.archived import (
    FOLDER,
    KINDS,
    MANIFEST,
    SETTLED,
    Gap,
    Manifest,
    Pass,
    archived_messages,
    load_manifest,
    read_passes,
    removed_by_topic,
)
from .sources.base import ColumnKind
from .sources.postgres import PostgresSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOCK: Final = "SELECT pg_try_advisory_lock(hashtextextended('outbox-reconcile archive', 0))"
_ABSENT: Final = "\x01"
# The content type of an erased message, as in outbox/erasure.py.
_ERASED: Final = "application/vnd.outbox.erased"


class Archive:
    """Runs one pass over the broker of a rules file, verifies all earlier passes, or erases messages in them."""

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
        self._store = Store(rules.archive, rules.output_mode)
        self._source = PostgresSource(spark, database)

    def run(self) -> tuple[Pass | None, list[Gap]]:
        """Archive the messages that were settled since the last pass. Return the new pass and the new gaps.

        The pass is None if no time has passed since the last pass. If the method raises ReconcileError, the archive is
        unchanged.
        """
        self._store.check_writable()
        try:
            with readable_errors("taking a snapshot"):
                reading = self._source.open([])
                if not self._source.query(_LOCK)[0][0]:
                    raise RunIncomplete(
                        "another pass over this broker is running. Start this pass again after the other pass has "
                        "ended."
                    )
            manifest = load_manifest(self._store) or Manifest(broker=reading.identity)
            if manifest.broker != reading.identity:
                raise UsageProblem(
                    f"{self._store.path(MANIFEST)} is the archive of broker {manifest.broker!r}, but the rules name "
                    f"broker {reading.identity!r}. Give each broker an archive of its own."
                )
            self._remove_unnamed(manifest)
            assert reading.watermark is not None
            return self._pass(manifest, reading.watermark.isoformat())
        finally:
            self._source.close()

    def verify(self) -> list[str]:
        """Read all passes again, and return an error text for each pass whose count or checksum has changed.

        Raises UsageProblem if there is no archive.
        """
        manifest = load_manifest(self._store)
        if manifest is None:
            raise UsageProblem(
                f"there is no archive at {self._store.path(MANIFEST)}: create it with outbox-reconcile archive."
            )
        problems = []
        for each in manifest.passes:
            with self._progress.step(f"stage verify: {each.folder}"), readable_errors(f"reading {each.folder}"):
                found = self._sums(each.folder)
            if found[0] != each.count:
                problems.append(
                    f"{each.folder} contained {each.count} messages when it was written, and contains {found[0]} now"
                )
            elif found[1] != each.checksum:
                problems.append(f"{each.folder} still contains {each.count} messages, but some of them have changed")
        return problems

    def erase(self, secret: str | None) -> int:
        """Erase the messages in the archive that were erased in the broker, and return their number.

        A pass with such messages is written anew, and is in force as soon as `archive.json` names it; its former files
        are then removed. `secret` is OUTBOX['ERASURE_SECRET'], by which erased keys are found. Raises UsageProblem if
        it is missing, or if there is no archive.
        """
        self._store.check_writable()
        try:
            with readable_errors("reading the erasures of the broker"):
                self._source.open([])
                if not self._source.query(_LOCK)[0][0]:
                    raise RunIncomplete("a pass over this broker is running. Repeat the erasure after it has ended.")
                table = sql.table_name("erased_v1", self._schema)
                columns = "kind, topic, value, replacement, erased_at::text"
                erased = self._source.query(f"SELECT {columns} FROM {table} WHERE kind <> 'subject'")
            manifest = load_manifest(self._store)
            if manifest is None:
                raise UsageProblem(f"there is no archive at {self._store.path(MANIFEST)}, so nothing can be erased.")
            if secret is None and any(row[0] == "key" for row in erased):
                raise UsageProblem(
                    "keys were erased in the broker, and the archive finds their messages by OUTBOX['ERASURE_SECRET']: "
                    "set the environment variable OUTBOX_ERASURE_SECRET to the same text."
                )
            count = sum(self._erase_in(manifest, place, erased, secret or "") for place in range(len(manifest.passes)))
            self._write_manifest(manifest)
            self._remove_unnamed(manifest)
            return count
        finally:
            self._source.close()

    def _erase_in(self, manifest: Manifest, place: int, erased: list[tuple[Any, ...]], secret: str) -> int:
        from pyspark.sql import functions as F

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
        if not count:
            return 0
        made = replace(each, name=f"{each.name.partition('.')[0]}.{uuid.uuid4().hex[:6]}")
        changed = {
            "key": F.when(has_key, F.col("by")).otherwise(F.col("key")),
            "content_type": F.lit(_ERASED),
            "headers": F.lit(None).cast("string"),
            "body": F.lit("").cast("binary"),
        }
        is_erased = F.col("by").isNotNull()
        columns = {name: F.when(is_erased, value).otherwise(F.col(name)) for name, value in changed.items()}
        with (
            self._progress.step(f"stage erase: {count} messages of {each.folder}"),
            readable_errors("erasing messages"),
        ):
            frame.withColumns(columns).drop("by").write.partitionBy("day").parquet(self._store.spark_path(made.folder))
            messages, checksum = self._sums(made.folder)
        if messages != each.count:
            raise RunIncomplete(
                f"{made.folder} contains {messages} messages, but {each.folder} contains {each.count}. The archive is "
                "unchanged. Repeat the erasure."
            )
        self._store.protect(made.folder)
        manifest.passes[place] = replace(made, checksum=checksum)
        return count

    def _write_manifest(self, manifest: Manifest) -> None:
        content = {"version": 1, **asdict(manifest)}
        self._store.write(MANIFEST, json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    def _pass(self, manifest: Manifest, until: str) -> tuple[Pass | None, list[Gap]]:
        since = manifest.until
        with self._progress.step("stage gaps: messages removed since"), readable_errors("counting removed messages"):
            gaps = self._account(manifest, until)
        if since is not None and datetime.fromisoformat(until) <= datetime.fromisoformat(since):
            return None, gaps
        terms = [f"{SETTLED} < '{until}'", "state IN ('committed', 'recalled')"]
        terms += [f"{SETTLED} >= '{since}'"] if since is not None else []
        name = f"{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}-{uuid.uuid4().hex[:6]}"
        folder = f"{FOLDER}/pass={name}"
        with self._progress.step(f"stage write: {folder}, settled from {since or 'the beginning'} to {until}"):
            with readable_errors("archiving messages"):
                expected, topics = self._expected(terms)
                self._write(folder, terms)
        with self._progress.step(f"stage verify: {expected[0]} messages"), readable_errors("verifying the archive"):
            found = self._sums(folder)
        if found != expected:
            raise RunIncomplete(
                f"{folder} contains {found[0]} messages with checksum {found[1]}, but the broker has {expected[0]} "
                f"messages with checksum {expected[1]}. The archive is unchanged. Run outbox-reconcile archive again."
            )
        made = Pass(name=name, since=since, until=until, count=expected[0], checksum=expected[1], topics=topics)
        manifest.passes.append(made)
        manifest.gaps += gaps
        self._progress.say(f"stage publish: {MANIFEST}")
        self._store.protect(folder)
        self._write_manifest(manifest)
        return made, gaps

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
        table = sql.table_name(FOLDER, self._schema)
        rows = self._source.query(
            f"SELECT topic, count(*), bit_xor({number}) FROM {table}{sql.where(terms)} GROUP BY topic",
            about="the broker's view message_v1",
        )
        count, checksum = 0, 0
        for _, messages, part in rows:
            count, checksum = count + int(messages), checksum ^ int(part)
        return (count, checksum), {str(row[0]): int(row[1]) for row in rows}

    def _write(self, folder: str, terms: list[str]) -> None:
        from pyspark.sql import functions as F

        frame = self._source.read([archived_messages(*terms)], None).withColumn("day", F.to_date("stored_at"))
        frame.write.partitionBy("day").parquet(self._store.spark_path(folder))

    def _sums(self, folder: str) -> tuple[int, int]:
        """The number and the checksum of the messages in a pass's files.

        `_expected` computes the checksum in the broker's database by the same formula.
        """
        from pyspark.sql import functions as F

        parts = [F.coalesce(_as_column(name, kind), F.lit(_ABSENT)) for name, kind in KINDS.items()]
        number = F.conv(F.substring(F.md5(F.concat_ws("|", *parts).cast("binary")), 1, 15), 16, 10).cast("bigint")
        frame = read_passes(self._spark, [self._store.spark_path(folder)])
        row = frame.agg(F.count(F.lit(1)), F.coalesce(F.bit_xor(number), F.lit(0).cast("bigint"))).collect()[0]
        return int(row[0]), int(row[1])

    def _remove_unnamed(self, manifest: Manifest) -> None:
        known = {each.folder for each in manifest.passes}
        for name in self._store.folders(FOLDER):
            if f"{FOLDER}/{name}" not in known:
                self._progress.say(f"  removing {FOLDER}/{name}, a pass that was not finished")
                self._store.remove(f"{FOLDER}/{name}")


def _as_text(name: str) -> str:
    kind = KINDS[name]
    if kind is ColumnKind.TIMESTAMP:
        return f"(extract(epoch FROM {name}) * 1000000)::bigint::text"
    return f"md5({name})" if kind is ColumnKind.BINARY else f"{name}::text"


def _as_column(name: str, kind: ColumnKind) -> Any:
    from pyspark.sql import functions as F

    if kind is ColumnKind.TIMESTAMP:
        return F.unix_micros(name).cast("string")
    return F.md5(name) if kind is ColumnKind.BINARY else F.col(name).cast("string")
