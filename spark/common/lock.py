"""The lock of an output folder: only one process at a time writes into a folder.

On a local or network disk the lock is an flock on `run.lock`. The kernel releases the lock of a process that has ended,
so the next run needs no other proof.

An object store has no such lock. Each run writes an object of its own below `locks/`, and then lists the objects there.
If a run finds the object of another run, it removes its own object and ends. Of two runs that start at once, at least
the later one finds the object of the other run, because the store lists an object as soon as it is written. An object
of an ended process is removed only with a proof, see `has_ended`. A lease with a timeout is no lock here: a process
that pauses for longer would write after its lease.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final

from .errors import RunIncomplete
from .store import Store

FILE: Final = "run.lock"
FOLDER: Final = "locks"
# A disk without flock answers with one of these errors.
_UNSUPPORTED: Final = (errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.ENOLCK)


def hold(store: Store) -> contextlib.AbstractContextManager[None]:
    """Hold the lock of the output folder. Raises RunIncomplete, with host, process and start time of the other run."""
    return _of_folder(store) if store.local_folder is not None else _of_objects(store)


@contextlib.contextmanager
def _of_folder(store: Store) -> Iterator[None]:
    with Path(store.path(FILE)).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise _refused(
                store, _holder(file.read()), "Wait for its end, or give another folder with --output"
            ) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            raise RunIncomplete(
                f"the disk of {store.path('')} has no flock ({error}), so a run cannot exclude another run. Give a "
                f"local folder, or the URI of an object store, with --output."
            ) from error
        _replace(file, json.dumps(_this_process()))
        try:
            yield
        finally:
            _replace(file, "")


def _replace(file: IO[str], text: str) -> None:
    file.seek(0)
    file.truncate()
    file.write(text)
    file.flush()


@contextlib.contextmanager
def _of_objects(store: Store) -> Iterator[None]:
    own = f"{FOLDER}/{uuid.uuid4().hex}.json"
    try:
        try:
            store.write(own, json.dumps(_this_process()))
            _exclude_others(store, own)
        except OSError as error:
            raise RunIncomplete(
                f"the lock of the output folder {store.path('').rstrip('/')} cannot be taken: {error}. Run it again."
            ) from error
        yield
    finally:
        # If the store does not answer, the object stays, and the next run names it.
        with contextlib.suppress(OSError):
            store.remove_file(own)


def _exclude_others(store: Store, own: str) -> None:
    for name in (f"{FOLDER}/{file}" for file in store.files(FOLDER)):
        text = None if name == own else store.read(name)
        if text is None:
            continue  # The object is this run's own, or the other run has ended since the listing.
        holder = _holder(text)
        if not has_ended(holder):
            raise _refused(store, holder, f"If this process no longer runs, remove {store.path(name)}")
        store.remove_file(name)


def _refused(store: Store, holder: dict[str, Any], remedy: str) -> RunIncomplete:
    known = "a run"
    if holder:
        known = f"the run of process {holder.get('pid')} on host {holder.get('host')}, since {holder.get('since')},"
    return RunIncomplete(
        f"{known} holds the lock of the output folder {store.path('').rstrip('/')}, and two runs would replace each "
        f"other's result. {remedy}."
    )


def _holder(text: str) -> dict[str, Any]:
    """The process that a lock names; empty if the process has not written its name yet."""
    try:
        holder = json.loads(text)
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
        "kernel": _kernel(),
    }


def has_ended(holder: dict[str, Any]) -> bool:
    """Whether this machine proves that the process has ended: it belongs to the same boot and to the same namespace of
    process ids, and no process has its id. For a process of another machine or container, there is no proof."""
    kernel = holder.get("kernel")
    return bool(kernel) and kernel == _kernel() and not Path(f"/proc/{holder['pid']}").exists()


def _kernel() -> str:
    """The boot and the namespace of process ids; '' if the operating system does not show them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
