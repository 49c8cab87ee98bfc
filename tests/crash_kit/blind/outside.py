"""The systems around the shop: a bank, a courier, a service for text messages, a store of keys, a disk.

They keep what they were told when a process of the shop dies, so they keep it in files.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def folder() -> Path:
    """The disk of these systems."""
    place = Path(os.environ.get("SHOP_OUTSIDE") or Path(tempfile.gettempdir()) / f"shop-outside-{os.getuid()}")
    place.mkdir(parents=True, exist_ok=True)
    return place


def clear() -> None:
    """Let all of them forget everything."""
    for item in folder().iterdir():
        shutil.rmtree(item) if item.is_dir() else item.unlink()


@contextmanager
def _alone() -> Iterator[None]:
    with (folder() / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Service:
    """A service that acts on requests. A request with a key that it knows gets the first answer again."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def _file(self) -> Path:
        return folder() / f"{self.name}.jsonl"

    def call(self, what: str, key: str = "") -> str:
        """Act, and return the id of the act."""
        with _alone():
            entries = self._entries()
            for number, (_, known) in enumerate(entries):
                if key and known == key:
                    return f"{self.name}-{number}"
            with self._file.open("a") as file:
                file.write(json.dumps([what, key]) + "\n")
            return f"{self.name}-{len(entries)}"

    def _entries(self) -> list[tuple[str, str]]:
        if not self._file.exists():
            return []
        return [(what, key) for what, key in map(json.loads, self._file.read_text().splitlines())]

    @property
    def acts(self) -> list[str]:
        """What the service has done, in order."""
        with _alone():
            return [what for what, _ in self._entries()]


class Store:
    """Keys like those of Redis."""

    @property
    def _folder(self) -> Path:
        place = folder() / "store"
        place.mkdir(exist_ok=True)
        return place

    def add(self, key: str) -> bool:
        """Set the key, unless it is there (SET NX)."""
        try:
            (self._folder / key).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def delete(self, key: str) -> None:
        (self._folder / key).unlink(missing_ok=True)


def documents() -> Path:
    """The folder of the shop's documents."""
    place = folder() / "documents"
    place.mkdir(exist_ok=True)
    return place


charges = Service("charge")
transfers = Service("transfer")
refunds = Service("refund")
invoices = Service("invoice")
courier = Service("courier")
texts = Service("text")
store = Store()
