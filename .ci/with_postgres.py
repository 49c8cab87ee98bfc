"""Run a command with $OUTBOX_POSTGRES_URL of a private server: python .ci/with_postgres.py BINARIES COMMAND..."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from outbox.broker import embedded
from outbox.broker.private_server import PrivateServer
from tests.conftest import SERVER_SETTINGS


def main() -> int:
    """Return the exit code of the command."""
    with tempfile.TemporaryDirectory(prefix="outbox-pg-", ignore_cleanup_errors=True) as folder:
        data = Path(folder) / "data"
        server = PrivateServer(Path(sys.argv[1]), data, embedded._server(data).account)
        url = server.start(SERVER_SETTINGS)
        try:
            environment = {**os.environ, embedded.URL_VARIABLE: url}
            return subprocess.run(sys.argv[2:], env=environment, check=False).returncode
        finally:
            server.stop()


if __name__ == "__main__":
    sys.exit(main())
