"""The output folder. A result is in force as soon as `result.json` is written. A run first writes all files that
`result.json` names.

    result.json             the result in force
    report.html             the report of the result, replaced after result.json
    runs/<run>/findings     Parquet, one row per finding
    runs/<run>/open         Parquet, the subjects that the next run judges again
    runs/<run>/report.html
    run.lock, locks/        the lock of the folder, see lock.py

An interrupted run leaves a folder under runs/ that no result names. Later runs remove this folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from .errors import UsageProblem

RESULT: Final = "result.json"
KEPT_RUNS: Final = 10
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*://")


class Store:
    """A local folder, or a URI that both Spark and Arrow support (s3a://, s3://, gs://, hdfs://).

    If the local folder is missing, it is made for this user alone, because findings contain keys of rows. An existing
    folder keeps its permissions. They alone protect the files: Spark's files are readable by all who may enter it.
    """

    def __init__(self, location: str) -> None:
        self._given, self._location = location, location.rstrip("/")
        self._is_local = _SCHEME.match(location) is None
        try:
            if self._is_local:
                self._location = str(Path(location).absolute())
                self._files, self._root = pafs.LocalFileSystem(), self._location
            else:
                uri = re.sub(r"^s3[an]://", "s3://", self._location)
                self._files, self._root = pafs.FileSystem.from_uri(uri)
        except (OSError, ValueError) as error:
            raise UsageProblem(
                f"the output {location!r} cannot be used: {error}. Give a folder with --output."
            ) from error

    def spark_path(self, name: str) -> str:
        """The path at which Spark writes and reads `name`."""
        return f"file://{self._location}/{name}" if self._is_local else f"{self._location}/{name}"

    def check_writable(self) -> None:
        """Make the folder, and raise UsageProblem if this process cannot write into it."""
        try:
            if self._is_local:
                Path(self._location).parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileExistsError):
                    Path(self._location).mkdir(mode=0o700)
            self.write(f"runs/.probe-{os.getpid()}", "")
            self._files.delete_file(f"{self._root}/runs/.probe-{os.getpid()}")
        except OSError as error:
            raise UsageProblem(
                f"the output {self._location!r} cannot be written: {error}. Correct its permissions, or give another "
                f"folder with --output."
            ) from error

    def note_of_readers(self) -> str:
        """A warning if every user of this machine can enter the local folder, else ''."""
        if not self._is_local or not Path(self._location).stat().st_mode & stat.S_IXOTH:
            return ""
        return (
            f"every user of this machine can read the keys and bodies in {self._location}, because its permissions let "
            f"others enter: chmod o-rwx {self._location}"
        )

    def read(self, name: str) -> str | None:
        """The text of a small file, or None if the file does not exist."""
        try:
            with self._files.open_input_stream(f"{self._root}/{name}") as stream:
                return str(stream.read(), "utf-8")
        except FileNotFoundError:
            return None

    def folders(self, name: str) -> list[str]:
        """The names of the folders in folder `name`."""
        return self._names(name, pafs.FileType.Directory)

    def files(self, name: str) -> list[str]:
        """The names of the files in folder `name`."""
        return self._names(name, pafs.FileType.File)

    def _names(self, name: str, kind: pafs.FileType) -> list[str]:
        found = self._files.get_file_info(pafs.FileSelector(f"{self._root}/{name}", allow_not_found=True))
        return sorted(info.base_name for info in found if info.type == kind)

    @property
    def local_folder(self) -> Path | None:
        """The folder; None if the location is a URI."""
        return Path(self._location) if self._is_local else None

    def remove_file(self, name: str) -> None:
        """Remove a file, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self._files.delete_file(f"{self._root}/{name}")

    def remove(self, name: str) -> None:
        """Remove a folder with everything in it."""
        self._files.delete_dir(f"{self._root}/{name}")

    def result(self) -> dict[str, Any] | None:
        """The result in force, or None if the folder has no result. Raises UsageProblem if `result.json` is damaged."""
        text = self.read(RESULT)
        if text is None:
            return None
        try:
            result = json.loads(text)
        except ValueError as error:
            raise UsageProblem(
                f"{self._location}/{RESULT} is damaged: {error}. Remove the file; the next run then reads everything."
            ) from error
        if not isinstance(result, dict) or result.get("version") != 1:
            raise UsageProblem(
                f"{self._location}/{RESULT} is not a result of this version. Give another folder with --output."
            )
        return result

    def result_in_force(self) -> dict[str, Any]:
        """The result in force. Raises UsageProblem if the folder has no result, or if `result.json` is damaged."""
        result = self.result()
        if result is None:
            raise UsageProblem(
                f"there is no result in {self._given}: run outbox-reconcile run --output {self._given} first."
            )
        return result

    def finding_lines(
        self, limit: int | None = None, wanted: Callable[[Mapping[str, Any]], bool] | None = None
    ) -> Iterator[str]:
        """At most `limit` findings of the result in force, for other programs. Each finding is one line of JSON with
        the name of its `run`. With `wanted`, only the findings for which `wanted` returns true.

        The most urgent findings come first, and acknowledged ones last. Times are ISO 8601 in UTC. The text is ASCII,
        so that a line separator in a key does not end a line. The method needs neither Java nor a database.
        """
        result = self.result_in_force()
        for finding in islice(filter(wanted, self.rows(result["findings"])), limit):
            yield json.dumps({"run": result["run"], **finding}, default=plain_json)

    def rows(self, name: str) -> Iterator[dict[str, Any]]:
        """The rows of a Parquet folder that the result names. Raises UsageProblem for a damaged or missing folder."""
        try:
            folder = pads.dataset(f"{self._root}/{name}", filesystem=self._files, format="parquet")
            for batch in folder.to_batches():
                yield from batch.to_pylist()
        except (OSError, pa.ArrowInvalid) as error:
            raise UsageProblem(
                f"{self._location}/{name}, which {RESULT} names, cannot be read: {error}. Run the reconciliation again."
            ) from error

    def write_table(self, name: str, table: pa.Table) -> None:
        """Write a table as a Parquet file, in the same way as `write`."""
        buffer = pa.BufferOutputStream()
        pq.write_table(table, buffer)
        self.write(name, buffer.getvalue().to_pybytes())

    def write(self, name: str, content: str | bytes) -> None:
        """Write a small file. On a local disk and in object stores, a reader sees the whole file or no file.

        On HDFS, a killed process may leave a part of the file. The next reader then reports the file as damaged.
        """
        target, data = f"{self._root}/{name}", content.encode() if isinstance(content, str) else content
        if self._is_local:
            self._write_local(Path(target), data)
            return
        self._files.create_dir(target.rsplit("/", 1)[0], recursive=True)
        with self._files.open_output_stream(target) as stream:
            stream.write(data)

    @staticmethod
    def _write_local(target: Path, data: bytes) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f"{target.name}.{os.getpid()}.tmp")
        with draft.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(target)

    def path(self, name: str) -> str:
        """The path of the file `name`, for messages to the user."""
        return f"{self._location}/{name}"

    def remove_old_runs(self, current: str) -> None:
        """Remove the folders of old runs except the newest KEPT_RUNS folders.

        If a folder cannot be removed, the next run tries again.
        """
        with contextlib.suppress(OSError):
            for name in self.folders("runs")[:-KEPT_RUNS]:
                if name != current:
                    self.remove(f"runs/{name}")


def plain_json(value: object) -> str:
    """The JSON form of a value that has no JSON type: a time in ISO 8601, any other value as its text."""
    return value.isoformat() if isinstance(value, datetime) else str(value)
