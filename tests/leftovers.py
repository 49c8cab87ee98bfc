"""A run of the tests has a folder for all it makes, and leaves nothing behind: no file, no server, no process."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Where pytest itself keeps `tmp_path`, to be looked at after a failure.
_KEPT_VARIABLE = "PYTEST_DEBUG_TEMPROOT"
# Java does not heed TMPDIR.
_FOLDER_VARIABLES = ("TMPDIR", "SPARK_LOCAL_DIRS")
_LOADING_SECONDS = 10.0
# A file system in memory, and the room (bytes) that the servers of a run need there.
_MEMORY = Path("/dev/shm")
_ROOM = 6 * 2**30
_OF_A_SERVER = "outbox-pg-"


def make_folder() -> Path:
    """A folder in which this process and its children put their temporary files from now on."""
    os.environ.setdefault(_KEPT_VARIABLE, tempfile.gettempdir())
    # Short: the sockets of the servers are in it, and their paths may have a hundred characters.
    folder = Path(tempfile.mkdtemp(prefix="outbox-"))
    for name in _FOLDER_VARIABLES:
        os.environ[name] = str(folder)
    tempfile.tempdir = None
    return folder


def remove_folder(folder: Path) -> None:
    """Remove it with what killed processes left in it."""
    for name in _FOLDER_VARIABLES:
        os.environ.pop(name, None)
    tempfile.tempdir = None
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def server_folder() -> Iterator[Path]:
    """A folder for the data of a server, in memory if there is room.

    There, PostgreSQL does all that it does on a disk, but no COMMIT and no new database waits for the disk; with one
    worker, that was a third of a test's time. A process that is killed loses no more there than on a disk: only the end
    of the whole machine does, and no test ends it.
    """
    place = None
    if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free >= _ROOM:
        place = _MEMORY
        _remove_those_of_killed_runs()
    prefix = f"{_OF_A_SERVER}{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=place, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _remove_those_of_killed_runs() -> None:
    for folder in _MEMORY.glob(f"{_OF_A_SERVER}*"):
        process = folder.name.removeprefix(_OF_A_SERVER).partition("-")[0]
        if not Path("/proc", process).exists():
            shutil.rmtree(folder, ignore_errors=True)


def left_running(folder: Path, *, within_seconds: float) -> list[str]:
    """The processes of the run that are still there when time is up, and which test each was started by."""
    deadline = time.monotonic() + within_seconds
    while (left := _processes(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _processes(folder: Path) -> list[str]:
    """Children carry the folder in their environment, however they were started. Without /proc nobody is found."""
    needle = f"TMPDIR={folder}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            entries = environment(process).split(b"\0")
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if needle in entries and int(process.name) != os.getpid():
            tests = [entry.decode() for entry in entries if entry.startswith(b"PYTEST_CURRENT_TEST=")]
            found.append(f"{process.name} {command.strip():.200} {' '.join(tests)}".rstrip())
    return found


def environment(process: Path) -> bytes:
    """What the kernel shows of it. The kernel shows nothing while it loads the program, and `Popen` returns earlier."""
    deadline = time.monotonic() + _LOADING_SECONDS
    while not (shown := (process / "environ").read_bytes()) and time.monotonic() < deadline:
        # A thread of the kernel and a process that has ended have no program: OSError.
        (process / "exe").readlink()
        has_arguments = (process / "cmdline").read_bytes() != b""
        time.sleep(0.001)
        if has_arguments:
            return (process / "environ").read_bytes()
    return shown
