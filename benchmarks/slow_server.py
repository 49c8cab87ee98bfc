"""The embedded server with a slow disk: every fsync and fdatasync takes some milliseconds longer, and is counted."""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psycopg

from benchmarks.harness import SERVER_SETTINGS
from outbox.broker import embedded

_SOURCE = Path(__file__).with_name("slow_disk.c")
_COUNT = struct.Struct("=q")
# Linux gives no process a greater id.
_PLACES = 4_194_304


@dataclass(frozen=True)
class SlowServer:
    """A running server; how often it waited for its disk."""

    url: str
    counts: Path

    def syncs(self, *pids: int) -> int:
        """Of these processes, or of all the server ever had."""
        with self.counts.open("rb") as file:
            return sum(_at(file.fileno(), place) for place in pids or (0,))


def _at(descriptor: int, place: int) -> int:
    value: int
    (value,) = _COUNT.unpack(os.pread(descriptor, _COUNT.size, place * _COUNT.size))
    return value


def compiler() -> str | None:
    return shutil.which("cc")


@contextlib.contextmanager
def slow_server(milliseconds: float) -> Iterator[SlowServer]:
    """Start it. Its new data directory is made at full speed. Needs a C compiler."""
    with tempfile.TemporaryDirectory(prefix="outbox-bench-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        library, counts = folder / "slow_disk.so", folder / "counts"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, _SOURCE, "-ldl"], check=True)
        with counts.open("wb") as file:
            file.truncate(_PLACES * _COUNT.size)
        # For root, the server is another user's.
        library.chmod(0o755)
        counts.chmod(0o666)
        data = folder / "data"
        embedded.start(data, settings=SERVER_SETTINGS)
        embedded.stop(data)
        preloaded = {
            "LD_PRELOAD": str(library),
            "OUTBOX_SLOW_DISK_MS": str(milliseconds),
            "OUTBOX_SLOW_DISK_COUNTS": str(counts),
        }
        try:
            with _environment(preloaded):
                url = embedded.start(data, settings=SERVER_SETTINGS)
            server = SlowServer(url, counts)
            _is_slow(server)
            yield server
        finally:
            embedded.stop(data)


def _is_slow(server: SlowServer) -> None:
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("CREATE TABLE slow_disk (n int)")
        if server.syncs(connection.info.backend_pid) < 1:
            raise SystemExit("the server does not load the preloaded library: its syncs are not slowed")


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
