"""A process that is killed at any step leaves the row and the message, or neither."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from tests.sqlalchemy.killed import STEPS
from tests.sqlalchemy.support import DRIVERS, stored
from tests.support import eventually

ROOT = Path(__file__).resolve().parent.parent.parent


def test_a_process_killed_at_each_step_leaves_row_and_message_or_neither(
    database: BrokerDatabase, connection: BrokerConnection
) -> None:
    command = [sys.executable, "-m", "tests.sqlalchemy.killed", database.conninfo]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    # The server ends the transactions of the killed processes when it sees their connections broken.
    others = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    eventually(lambda: not connection.execute(f"{others} AND backend_type = 'client backend'").fetchall())
    expected = sorted(f"{driver} {step}" for driver in DRIVERS for step, committed in STEPS.items() if committed)
    assert stored(connection) == (expected, expected)
