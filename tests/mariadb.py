"""A private MariaDB, where its programs and its client `mysqlclient` are installed."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

from tests.support import eventually

VARIABLE: Final = "OUTBOX_TEST_MARIADB"
"""The environment variable with which the alias `lite` of the Django suites is on MariaDB."""

_SQLITE: Final = "about SQLite, which has one writer"
NOT_ON_MARIADB: Final = {
    "test_a_locked_sqlite_is_no_attempt": _SQLITE,
    "test_a_locked_sqlite_file_is_named": _SQLITE,
    "test_handlers_on_sqlite_take_turns": _SQLITE,
    "test_a_writer_of_another_process_on_sqlite_costs_no_attempt": _SQLITE,
    "test_many_threads_run_each_task_once_on_sqlite": _SQLITE,
    "test_sqlite_a_rollback_by_hand_then_publish_is_not_sent_at_once": (
        "the statement is executed on the driver's own connection: MariaDB's driver does not show the open transaction"
    ),
}
"""The tests that a run with MariaDB skips, and why."""

_PATH: Final = f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin"
_SERVER: Final = shutil.which("mariadbd", path=_PATH)
_INSTALL: Final = shutil.which("mariadb-install-db", path=_PATH)

is_installed: Final = bool(_SERVER and _INSTALL and importlib.util.find_spec("MySQLdb"))

# What a server of production has by default, but for the waits that a test would spend.
_SETTINGS: Final = ("--skip-networking", "--innodb-buffer-pool-size=64M", "--max-connections=300")


class PrivateMariaDB:
    """A MariaDB of a run's own in `folder`. It accepts only connections through its socket."""

    def __init__(self, folder: Path) -> None:
        assert _SERVER and _INSTALL
        self.socket = folder / "socket"
        self._log = folder / "log"
        # MariaDB refuses to run as root.
        self._user = "mysql" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
        folder.chmod(0o711)
        for one in folder.parents[: len(folder.parents) - 1]:
            if not one.stat().st_mode & 0o001:
                one.chmod(one.stat().st_mode | 0o001)
        if os.geteuid() == 0:
            shutil.chown(folder, self._user)
        data = folder / "data"
        common = ["--no-defaults", f"--user={self._user}", f"--datadir={data}", f"--tmpdir={folder}"]
        subprocess.run(
            [_INSTALL, *common, "--auth-root-authentication-method=normal", "--skip-test-db", "--skip-log-bin"],
            stdout=subprocess.DEVNULL,
            check=True,
        )
        self._command = [_SERVER, *common, f"--socket={self.socket}", f"--pid-file={folder / 'pid'}", *_SETTINGS]

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(self._command, stdout=output, stderr=output)
        eventually(self._answers, within_seconds=60, what=self._log.read_text)

    def stop(self) -> None:
        """End the server, as its service manager does."""
        self._process.terminate()
        self._process.wait()

    def kill(self) -> None:
        """End the server without warning."""
        self._process.kill()
        self._process.wait()

    def execute(self, statement: str, database: str = "") -> list[tuple[Any, ...]]:
        """Execute one statement on a connection of its own, and return its rows."""
        import MySQLdb

        connection = MySQLdb.connect(unix_socket=str(self.socket), user="root", database=database)
        try:
            with connection.cursor() as cursor:
                cursor.execute(statement)
                rows = list(cursor.fetchall())
            connection.commit()
            return rows
        finally:
            connection.close()

    def create_database(self, name: str, **options: Any) -> dict[str, Any]:
        """Create an empty database, and return its entry for DATABASES."""
        self.execute(f"CREATE DATABASE `{name}` CHARACTER SET utf8mb4")
        return {
            "ENGINE": "django.db.backends.mysql",
            "NAME": name,
            "USER": "root",
            "HOST": str(self.socket),
            "OPTIONS": {"init_command": "SET time_zone = '+00:00', idle_transaction_timeout = 60", **options},
        }

    def _answers(self) -> bool:
        import MySQLdb

        assert self._process.poll() is None, self._log.read_text()
        try:
            MySQLdb.connect(unix_socket=str(self.socket), user="root").close()
        except MySQLdb.OperationalError:
            return False
        return True
