"""Continuous reconciliation: a streaming query whose every micro-batch is an incremental run.

A batch reads the sources under its own snapshots and continues from the result in force, as `outbox-reconcile run`
does. The batch judges the rows up to its own start; the stream only gives it a number. `result.json` names the query
and the batch that wrote it. Spark may repeat a batch after a crash. If the result of a repeated batch is in force
already, the batch does not judge again, because a second judgement would count the new findings of the batch as known.

A streaming join would be a second implementation of every class of finding, and would keep its state for as long as the
longest time limit of a rule.
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
from .pipeline import run
from .rules import file as rules_file

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

CHECKPOINT: Final = "checkpoint"
# Spark's own source of one numbered batch per trigger. A source in Python would need a process of its own, and Spark
# ends the query if this process needs more than ten seconds to start.
_NUMBERED_BATCHES: Final = "rate-micro-batch"


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
        self._has_judged = False

    def available_now(self) -> dict[str, Any]:
        """Judge all rows up to now, and return the result in force. Raises ReconcileError as `run` does."""
        # If the result of a repeated batch is in force already, the query may end without another batch. Then a second
        # query judges the rows since that result.
        while not self._has_judged:
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
        batches = self._spark.readStream.format(_NUMBERED_BATCHES).option("rowsPerBatch", 1).load()
        writer = batches.writeStream.foreachBatch(self._batch).option(
            "checkpointLocation", self._store.spark_path(CHECKPOINT)
        )
        return writer.trigger(**trigger).start()

    def _batch(self, _: DataFrame, number: int) -> None:
        try:
            self._run_window(number)
        except RunIncomplete as error:
            if not self._is_lasting:
                self._failure = error
                raise
            self._progress.say(f"batch {number}: {error} The next batch judges the same rows too.")
        except Exception as error:
            self._failure = error  # Keep the error, because Spark would return only the error's text.
            raise

    def _run_window(self, number: int) -> None:
        batch = Batch(self._query_id(), number)
        if batch.is_in(self._store.result()):
            self._progress.say(f"batch {number}: its result is in force already")
            return
        until = datetime.now(UTC)
        self._progress.say(f"batch {number}: up to {until.isoformat()}")
        options = replace(self._options, batch=batch, no_later_than=until)
        result = run(self._spark, options, self._progress)
        self._has_judged = True
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
