"""Run a command with $OUTBOX_POSTGRES_URL of a private server: python .ci/with_postgres.py BINARIES COMMAND..."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from outbox.broker import embedded
from tests.conftest import SERVER_SETTINGS


def main() -> int:
    """Return the exit code of the command."""
    binaries = Path(sys.argv[1])
    account = embedded._server(Path("var")).account
    for folder in (binaries, *binaries.parents):
        if not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o001)

    def run(program: str, *arguments: str) -> None:
        # PostgreSQL refuses to run as root.
        who = {} if account.pw_uid == os.geteuid() else {"user": account.pw_uid, "group": account.pw_gid}
        subprocess.run([str(binaries / program), *arguments], check=True, extra_groups=[], cwd=folder, **who)

    with tempfile.TemporaryDirectory(prefix="outbox-pg-", ignore_cleanup_errors=True) as name:
        # Only root and the account of the server may enter the folder with the socket, so the server trusts them.
        folder = Path(name)
        os.chown(folder, account.pw_uid, account.pw_gid)
        settings = SERVER_SETTINGS | {"listen_addresses": "", "unix_socket_directories": name}
        options = " ".join(f"-c {key}='{value}'" for key, value in settings.items())
        run("initdb", "-D", f"{name}/data", "-U", "postgres", "--auth=trust", "--encoding=utf8", "--no-sync")
        run("pg_ctl", "start", "-w", "-s", "-D", f"{name}/data", "-l", f"{name}/log", "-o", options)
        try:
            url = f"postgresql://postgres@/postgres?host={name}"
            environment = {**os.environ, embedded.URL_VARIABLE: url}
            return subprocess.run(sys.argv[2:], env=environment, check=False).returncode
        finally:
            run("pg_ctl", "stop", "-s", "-m", "immediate", "-D", f"{name}/data")


if __name__ == "__main__":
    sys.exit(main())
