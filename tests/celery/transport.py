"""Celery's transport on the test's own server: kombu's SQLAlchemy one."""

from __future__ import annotations

import subprocess
import sys

from kombu.connection import Connection
from psycopg.conninfo import conninfo_to_dict


def transport(url: str) -> str:
    """The transport's URL for a database's."""
    info = conninfo_to_dict(url)
    user, password = info.get("user", "postgres"), info.get("password", "")
    where = f"host={info['host']}&port={info.get('port', 5432)}"
    return f"sqla+postgresql+psycopg://{user}:{password}@/{info['dbname']}?{where}"


def create_queue(url: str, name: str) -> None:
    """Create the transport's tables and a queue, as before a first start.

    Of two processes that both find them missing, kombu ends the slower one ("duplicate key value violates unique
    constraint kombu_queue_name_key"). In a process of its own: kombu leaves a connection open.
    """
    subprocess.run([sys.executable, "-m", "tests.celery.transport", url, name], check=True)


if __name__ == "__main__":
    with Connection(transport(sys.argv[1])) as connection:  # type: ignore[no-untyped-call]
        connection.SimpleQueue(sys.argv[2]).close()
