"""A disk that loses what was not flushed: the disk of a machine that loses its power."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Final

import pytest

# Linux's EXT4_IOC_SHUTDOWN with the flag that discards the journal's unwritten part.
_SHUTDOWN: Final = 0x8004587D
_NO_LOG_FLUSH: Final = struct.pack("I", 2)


class Disk:
    """An ext4 file system in a file, mounted at `folder`."""

    def __init__(self, folder: Path, size: str = "2G") -> None:
        if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
            pytest.skip("a disk that loses its cache needs root and mkfs.ext4")
        self.folder = folder
        self._image = folder.with_suffix(".img")
        folder.mkdir(parents=True)
        subprocess.run(["truncate", "-s", size, str(self._image)], check=True)
        subprocess.run(["mkfs.ext4", "-q", "-F", str(self._image)], check=True)
        self._mount()

    def lose_power(self) -> None:
        """Forget all that was written and not flushed. The caller has killed the processes that use the disk."""
        opened = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.ioctl(opened, _SHUTDOWN, _NO_LOG_FLUSH)
        finally:
            os.close(opened)
        self._unmount()
        self._mount()

    def close(self) -> None:
        """Unmount the disk and remove its file."""
        self._unmount()
        self._image.unlink()

    def _mount(self) -> None:
        subprocess.run(["mount", "-o", "loop", str(self._image), str(self.folder)], check=True)

    def _unmount(self) -> None:
        subprocess.run(["umount", str(self.folder)], check=True)
