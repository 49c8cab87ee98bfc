"""Continuous reconciliation: a streaming query whose every micro-batch is an incremental run.

A batch reads the sources under its own snapshots and continues from the result in force, as `outbox-reconcile run`
does. The stream itself contains only moments. A moment is the time up to which a batch judges. `result.json` names the
query and the batch that wrote it. Spark may repeat a batch after a crash. If the result of a repeated batch is in force
already, the batch does not judge again, because a second judgement would count the new findings of the batch as known
(docs/decisions/054-a-stream-of-moments.md).
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from .common.errors import ReconcileError, RunIncomplete, UsageProblem
from .common.options import Batch, RunOptions
from .common.progress import Progress
from .common.store import Store
from .output.result import shown_totals
from .rules import file as rules_file
from .run import run
from .sources.moments import NAME, MomentSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

CHECKPOINT: Final = "checkpoint"


class Watch:
    """One streaming query over one rules file and output folder."""

    def __init__(self, spark: SparkSession, options: RunOptions, progress: Progress) -> None:
        if options.is_interval or options.full:
            raise UsageProblem(
                "a continuous reconciliation continues at the end of the last result: it accepts neither an "
                "interval (--from, --to) nor --full."
            )
        self._spark, self._options, self._progress = spark, options, progress
        self._store = Store(options.output, rules_file.load(options.rules).output_mode)
        self._is_lasting = False
        self._failure: Exception | None = None
        self._reached = datetime.fromtimestamp(0, UTC)

    def available_now(self) -> dict[str, Any]:
        """Judge all rows up to now, and return the result in force. Raises ReconcileError as `run` does."""
        end = datetime.now(UTC)
        # If a batch was killed, the query first repeats that batch up to its old moment and then ends, so a second
        # query may be needed.
        while self._reached < end:
            self._wait(self._start({"availableNow": True}))
        result = self._store.result()
        assert result is not None  # A batch that publishes no result raises an error.
        return result

    def every(self, interval: str) -> StreamingQuery:
        """Start a query that runs a batch per interval ('1 minute') until the caller stops it; see `wait`.

        If a batch cannot judge its window (RunIncomplete), the batch prints the reason, and the next batch judges this
        window too. Any other error ends the query.
        """
        self._is_lasting = True
        return self._start({"processingTime": interval})

    def wait(self, query: StreamingQuery, seconds: int) -> bool:
        """Wait for the end of the query, and return whether it has ended. Raises the error that ended the query."""
        from pyspark.errors import StreamingQueryException

        try:
            return bool(query.awaitTermination(seconds))
        except StreamingQueryException as error:
            raise self._failure or _stream_failure(error) from error

    def _wait(self, query: StreamingQuery) -> None:
        while not self.wait(query, 1):
            pass

    def _start(self, trigger: dict[str, Any]) -> StreamingQuery:
        self._store.check_writable()
        self._store.make_folder(CHECKPOINT)
        self._spark.dataSource.register(MomentSource)
        moments = self._spark.readStream.format(NAME).load()
        writer = moments.writeStream.foreachBatch(self._batch).option(
            "checkpointLocation", self._store.spark_path(CHECKPOINT)
        )
        return writer.trigger(**trigger).start()

    def _batch(self, moments: DataFrame, number: int) -> None:
        try:
            self._run_window(moments, number)
        except RunIncomplete as error:
            if not self._is_lasting:
                self._failure = error
                raise
            self._progress.say(f"batch {number}: {error} The next batch judges the same rows too.")
        except Exception as error:
            self._failure = error  # Keep the error, because Spark would return only the error's text.
            raise

    def _run_window(self, moments: DataFrame, number: int) -> None:
        until = max(datetime.fromisoformat(row["until"]) for row in moments.collect())
        batch = Batch(self._query_id(), number)
        if batch.is_in(self._store.result()):
            self._progress.say(f"batch {number}: its result is in force already")
            self._reached = until
            return
        self._progress.say(f"batch {number}: up to {until.isoformat()}")
        options = replace(self._options, batch=batch, no_later_than=until)
        result = run(self._spark, options, self._progress)
        self._reached = until
        self._progress.say(f"batch {number}: {shown_totals(result)}")

    def _query_id(self) -> str:
        """The id of the query, which Spark stores in the checkpoint. The query keeps this id over restarts."""
        text = self._store.read(f"{CHECKPOINT}/metadata")
        assert text is not None  # Spark writes the file `metadata` before the first batch.
        return str(json.loads(text)["id"])


def _stream_failure(error: Exception) -> ReconcileError:
    # In the error text, everything after "=== Streaming Query ===" is a query plan, which does not show the cause.
    reason = " ".join(str(error).partition("=== Streaming Query ===")[0].split())
    return RunIncomplete(
        f"the streaming query failed: {reason}. The previous result stays in force. Start the query again. If its "
        f"checkpoint is damaged, first remove the folder {CHECKPOINT!r} from the output folder: the query then "
        f"continues from the result in force."
    )
