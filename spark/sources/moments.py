"""The source of a continuous reconciliation is a stream of moments. A micro-batch judges the rows up to the moment of
the batch."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

NAME: Final = "outbox_moments"
_FIRST: Final = datetime.fromtimestamp(0, UTC).isoformat()


class MomentSource(DataSource):
    """A stream whose offsets are moments (ISO 8601). Spark writes the moment of a batch into the checkpoint before the
    batch begins. So Spark repeats a killed batch up to the same moment."""

    @classmethod
    def name(cls) -> str:
        """The name of this source, as an argument of `readStream.format`."""
        return NAME

    def schema(self) -> str:
        """The stream has one row per batch: the moment of the batch. The stream contains no messages, because each
        batch reads the messages from the sources."""
        return "until string"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """The reader of the stream, which runs in a process of its own."""
        return _MomentReader()


class _Until(InputPartition):
    """The one partition of a batch."""


class _MomentReader(DataSourceStreamReader):
    def initialOffset(self) -> dict[str, str]:  # noqa: N802
        return {"until": _FIRST}

    # Spark 4.0 calls this method without arguments. Releases of Spark after 4.0 pass the previous offset and a limit.
    def latestOffset(self, *_: Any) -> dict[str, str]:  # noqa: N802
        return {"until": datetime.now(UTC).isoformat()}

    def partitions(self, start: dict[str, str], end: dict[str, str]) -> list[InputPartition]:
        return [_Until(end["until"])]

    def read(self, partition: InputPartition) -> Iterator[tuple[str]]:
        yield (str(partition.value),)
