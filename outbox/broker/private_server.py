"""Run PostgreSQL on a data directory so that only the user who starts it has access.

- The server listens on no port. Its socket is in the data directory. If the path of the data directory is too long for
  a socket, the server puts the socket into a new folder below the temporary directory. Only the server's user may enter
  this folder.
- The server asks the kernel for the user of each connection (`peer`), and accepts only the user who started the server.
  The accepted user may connect with any PostgreSQL role. So the server needs no password, and access to the server does
  not depend on the permissions of the folders.
- PostgreSQL refuses to run as root. If root starts the server, the server runs under a separate user account. That
  account gets the right to enter the folders above the data directory, but not to list them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

import psycopg

_SOCKET: Final = ".s.PGSQL.5432"
# The longest path of a socket on macOS, without the closing NUL. Other systems allow longer paths.
_LONGEST_SOCKET_PATH: Final = 103
_MARK: Final = "# settings of outbox.broker.embedded"
_REMEMBERED: Final = "socket_directory"
_ACCESS: Final = {
    "pg_hba.conf": "# Written by outbox.broker.embedded.\n"
    "local all all peer map=outbox\nlocal replication all peer map=outbox\n",
    "pg_ident.conf": '# Written by outbox.broker.embedded.\noutbox "{user}" all\n',
}
_START_SECONDS: Final = 60
_SETTLE_SECONDS: Final = 10.0


@contextlib.contextmanager
def one_process(folder: Path) -> Iterator[None]:
    """Let one of several processes at a time run the block, by a lock on the folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class PrivateServer:
    """PostgreSQL's programs in `binaries`, a data directory, and the account that runs the server."""

    binaries: Path
    data: Path
    account: pwd.struct_passwd

    def start(self, settings: Mapping[str, str]) -> str:
        """Start the server unless it runs, and return its URL. Raises OSError or subprocess.SubprocessError."""
        self._prepare()
        with one_process(self.data):
            if not (self.data / "PG_VERSION").exists():
                self._initialise()
            changed = self._restrict()
            if self._is_up():
                if changed:
                    self._run("pg_ctl", "reload", "-D", str(self.data))
            else:
                self._write_settings(settings)
                log = str(self.data / "log")
                self._run("pg_ctl", "start", "-w", "-t", str(_START_SECONDS), "-D", str(self.data), "-l", log)
        return self.url()

    def stop(self) -> None:
        """Stop the server, if it runs, and remove its socket's folder."""
        if self._is_running():
            self._run("pg_ctl", "stop", "-w", "-m", "fast", "-D", str(self.data))
        remembered = self._remembered()
        if remembered is not None:
            shutil.rmtree(remembered, ignore_errors=True)
        (self.data / _REMEMBERED).unlink(missing_ok=True)

    def url(self) -> str:
        """The URL of the running server."""
        folder = (self.data / "postmaster.pid").read_text(encoding="utf-8").splitlines()[4]
        return f"postgresql://postgres@/postgres?host={quote(folder, safe='/')}"

    # -- the data directory -------------------------------------------------------------------------

    def _prepare(self) -> None:
        self.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = self.data.lstat().st_uid
        if owner not in (os.geteuid(), self.account.pw_uid):
            raise PermissionError(f"{self.data} belongs to another user (id {owner}): use a folder that belongs to you")
        if self.account.pw_uid != os.geteuid():
            for folder in (self.binaries, *self.binaries.parents, *self.data.parents):
                mode = folder.stat().st_mode
                if not mode & stat.S_IXOTH:
                    folder.chmod(mode | stat.S_IXOTH)
            os.chown(self.data, self.account.pw_uid, self.account.pw_gid)

    def _initialise(self) -> None:
        access = ("--auth-local=peer", "--auth-host=reject")
        self._run("initdb", *access, "--encoding=utf8", "-U", "postgres", "-D", str(self.data))

    def _restrict(self) -> bool:
        """Write the files that make the server accept only its own user, and return whether a file has changed."""
        user = pwd.getpwuid(os.geteuid()).pw_name
        wanted = {self.data / name: text.format(user=user) for name, text in _ACCESS.items()}
        changed = [path for path, text in wanted.items() if path.read_text(encoding="utf-8") != text]
        for path in changed:
            path.write_text(wanted[path], encoding="utf-8")
        return bool(changed)

    def _write_settings(self, settings: Mapping[str, str]) -> None:
        path = self.data / "postgresql.conf"
        kept = path.read_text(encoding="utf-8").split(_MARK)[0]
        ours = {
            "listen_addresses": "",
            "unix_socket_directories": f'"{self._socket_directory()}"',
            "unix_socket_permissions": "0700",
        }
        quoted = {name: value.replace("'", "''") for name, value in {**settings, **ours}.items()}
        lines = [f"{name} = '{value}'" for name, value in quoted.items()]
        path.write_text("\n".join([kept.rstrip("\n"), _MARK, *lines, ""]), encoding="utf-8")

    # -- the socket's folder ------------------------------------------------------------------------

    def _socket_directory(self) -> Path:
        if len(os.fsencode(self.data / _SOCKET)) <= _LONGEST_SOCKET_PATH:
            return self.data
        remembered = self._remembered()
        if remembered is not None and not remembered.lstat().st_mode & 0o077:
            return remembered
        made = Path(tempfile.mkdtemp(prefix="outbox-socket-"))
        os.chown(made, self.account.pw_uid, self.account.pw_gid)
        (self.data / _REMEMBERED).write_text(str(made), encoding="utf-8")
        return made

    def _remembered(self) -> Path | None:
        """Return the folder of the server's previous socket, if the folder still belongs to the server's user.

        If the server uses the same folder after a restart, processes that know the URL of the server can connect again.
        """
        try:
            folder = Path((self.data / _REMEMBERED).read_text(encoding="utf-8"))
            found = folder.lstat()
        except FileNotFoundError:
            return None
        return folder if stat.S_ISDIR(found.st_mode) and found.st_uid == self.account.pw_uid else None

    # -- the server -----------------------------------------------------------------------------

    def _is_up(self) -> bool:
        """Return whether the server runs and answers. If the server is stopping, wait until its process has ended."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while self._is_running() and time.monotonic() < deadline:
            with contextlib.suppress(psycopg.OperationalError, OSError, IndexError):
                psycopg.connect(self.url(), connect_timeout=5).close()
                return True
            time.sleep(0.05)
        return False

    def _is_running(self) -> bool:
        if not (self.data / "postmaster.pid").exists():
            return False
        try:
            self._run("pg_ctl", "status", "-D", str(self.data))
        except subprocess.CalledProcessError:
            return False
        return True

    def _run(self, program: str, *arguments: str) -> None:
        own = self.account.pw_uid == os.geteuid()
        # The output goes to a file, because the server inherits the output of pg_ctl and would keep a pipe open.
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            done = subprocess.run(
                [self.binaries / program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.data,
                user=None if own else self.account.pw_uid,
                group=None if own else self.account.pw_gid,
                extra_groups=None if own else [],
                check=False,
            )
            if done.returncode != 0:
                output.seek(0)
                raise subprocess.CalledProcessError(done.returncode, f"{program}: {output.read().strip()}")
