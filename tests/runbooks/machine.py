"""A machine on which bash runs the blocks of a runbook: PostgreSQL, the shop's units, and what the page names.

The programs are the real ones. Those of PostgreSQL run as the account of the server, as on a real machine. `systemctl`
is systemctl.py of this folder, because a test has no systemd of its own.
"""

from __future__ import annotations

import os
import pwd
import re
import shlex
import subprocess
import sys
import textwrap
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from outbox.broker import embedded
from tests.documents import DOCS, ROOT, text_of
from tests.runbooks import systemctl
from tests.servers import free_ports
from tests.support import eventually

PAGE = DOCS / "operations" / "restore.md"
_BLOCK = re.compile(r"^( *)```sh\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
# A small server whose socket is in its data directory, wherever this is moved to.
# The roles of the databases. PostgreSQL 15 has no word for all of them.
ROLES = ("postgres", "shop")
_SETTINGS = """
listen_addresses = ''
unix_socket_directories = '.'
shared_buffers = 32MB
max_connections = 60
max_wal_size = 1GB
"""


def sections(page: Path = PAGE) -> dict[str, list[str]]:
    """The blocks `sh` of each section (## and ###) of a page, by heading."""
    parts = re.split(r"^##+ (.+)$", text_of(page), flags=re.MULTILINE)
    return {
        heading: [textwrap.dedent(code) for _, code in _BLOCK.findall(text)]
        for heading, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def binaries() -> Path:
    """PostgreSQL's programs that the tests embed."""
    return embedded._server(Path()).binaries


def write_programs(folder: Path, programs: Path, account: pwd.struct_passwd) -> Path:
    """Put PostgreSQL's programs into `folder`, which run as the account of the server if root calls them."""
    folder.mkdir(exist_ok=True)
    as_server = f"setpriv --reuid={account.pw_uid} --regid={account.pw_gid} --clear-groups"
    if account.pw_uid == os.geteuid():
        as_server = ""
    for program in programs.iterdir():
        lines = ["#!/bin/sh", f'[ "$(id -u)" = 0 ] || exec {program} "$@"', f'{as_server} {program} "$@" || exit']
        if program.name == "pg_basebackup":
            # The lock of the socket, which is in the data directory here, names the process of the first server.
            lines.append(
                'for word; do case $word in --pgdata=*) rm -f "${word#--pgdata=}"/.s.PGSQL.*.lock;; esac; done'
            )
        (folder / program.name).write_text("\n".join([*lines, ""]))
        (folder / program.name).chmod(0o755)
    return folder


@dataclass
class Machine:
    """The folder with everything, and the variables that the page names."""

    folder: Path
    programs: Path = field(default_factory=binaries)
    variables: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.account: pwd.struct_passwd = embedded._server(Path()).account
        self.folder.chmod(0o755)
        for folder in (*self.folder.parents, self.programs, *self.programs.parents):
            if not (mode := folder.stat().st_mode) & 0o001:
                folder.chmod(mode | 0o001)
        for name in ("bin", "run", "backups", "archive", "volume"):
            (self.folder / name).mkdir()
            self.own(self.folder / name)
        self.data = self.folder / "volume" / "data"
        settings = self.folder / "settings.conf"
        settings.write_text(_SETTINGS)
        [health] = free_ports(1)
        self.variables |= {
            "DATA": str(self.data),
            "SETTINGS": str(settings),
            "BACKUPS": str(self.folder / "backups"),
            "ARCHIVE": str(self.folder / "archive"),
            "ENVIRONMENT_FILE": str(self.folder / "shop.env"),
            "TEST_FOLDER": str(self.folder),
            "TEST_HEALTH_PORT": str(health),
            "DJANGO_SETTINGS_MODULE": "tests.runbooks.settings",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }
        self.write_environment(
            ADMIN_URL=self.url("postgres"), APPLICATION_URL=self.url("shop"), OUTBOX_BROKER_URL=self.url("broker")
        )
        self.use(self.programs)
        self._write("manage.py", f"#!{sys.executable}\nfrom django.core.management import execute_from_command_line\n"
                    "import sys\nexecute_from_command_line(sys.argv)\n")  # fmt: skip
        (self.folder / "manage.py").symlink_to(self.folder / "bin" / "manage.py")
        self._write("systemctl", f'#!/bin/sh\nexec {sys.executable} -m tests.runbooks.systemctl "$@"\n')

    # -- what is on it ------------------------------------------------------------------------------

    def install(self, *, tables: bool = True) -> None:
        """A server with both databases, and all tables."""
        self.start_server()
        self.create_databases()
        if tables:
            self.bash("manage.py migrate --database=broker\nmanage.py migrate --run-syncdb")

    def start_server(self) -> None:
        """A new server that lets this process and its own account connect as any role."""
        self.bash('initdb -D "$DATA" -U postgres --encoding=UTF8 --no-locale --auth=peer')
        for name, text in (("pg_hba.conf", "local all all peer map=both\nlocal replication all peer map=both\n"),
                           ("pg_ident.conf", "".join(f"both {user} {role}\n" for role in ROLES
                            for user in {"root", self.account.pw_name}))):  # fmt: skip
            (self.data / name).write_text(text)
        self.bash('cat "$SETTINGS" >> "$DATA/postgresql.conf"\npg_ctl start -w -D "$DATA" -l "$DATA/log"')

    def create_databases(self) -> None:
        self.bash('psql "$ADMIN_URL" -q -c "CREATE DATABASE shop" -c "CREATE DATABASE broker"')

    def url(self, database: str, *folders: Path) -> str:
        """The address of a database; with `folders`, of the writable server of several."""
        hosts = ",".join(str(folder) for folder in folders or (self.data,))
        several = "&target_session_attrs=read-write" if len(folders) > 1 else ""
        return f"postgresql://postgres@/{database}?host={hosts}{several}"

    def write_environment(self, **urls: str) -> None:
        """Write /etc/shop.env."""
        lines = [f'{name}="{url}"\n' for name, url in urls.items()]
        Path(self.variables["ENVIRONMENT_FILE"]).write_text("".join(lines))

    def environment(self) -> dict[str, str]:
        """The variables of a block; those of /etc/shop.env as they are now."""
        pairs = (line.split("=", 1) for line in Path(self.variables["ENVIRONMENT_FILE"]).read_text().splitlines())
        addresses = {name: shlex.split(value)[0] for name, value in pairs}
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return {**os.environ, "PATH": path, **self.variables, **addresses}

    # -- running blocks -----------------------------------------------------------------------------

    def bash(self, block: str, *, codes: tuple[int, ...] = (0,)) -> str:
        """Run a block and return its output; fails unless it ends with one of `codes`."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            cwd=self.folder,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode in codes, f"exit code {done.returncode}:\n{block}\n{done.stdout}\n{self.logs()}"
        return done.stdout

    def logs(self) -> str:
        """The ends of the logs, for a failure."""
        found = [*self.folder.glob("*.log"), *self.folder.glob("volume/*/log")]
        return "\n".join(f"-- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in found)

    def stop(self) -> None:
        """End what the blocks have started."""
        for file in self.folder.glob("*.pid"):
            systemctl.stop(self.folder, file.stem)
        for file in [*self.folder.glob("*/postmaster.pid"), *self.folder.glob("*/*/postmaster.pid")]:
            self.bash(f"pg_ctl stop -m immediate -D {file.parent}", codes=(0, 1))

    def run(self, heading: str, *numbers: int, codes: tuple[int, ...] = (0,)) -> str:
        """Run the blocks of a section of the page, all or those with these numbers."""
        blocks = sections()[heading]
        return "".join(self.bash(blocks[number], codes=codes) for number in numbers or range(len(blocks)))

    # -- what the shop has --------------------------------------------------------------------------

    def ask(self, variable: str, query: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.environment()[variable], autocommit=True) as connection:
            return connection.execute(query.encode()).fetchall()

    def orders(self) -> list[str]:
        return sorted(number for (number,) in self.ask("APPLICATION_URL", "SELECT number FROM shop_order"))

    def effects(self) -> Counter[str]:
        return Counter(number for (number,) in self.ask("APPLICATION_URL", "SELECT number FROM shop_effect"))

    def placed(self) -> list[str]:
        """The orders that the web process was told to be placed."""
        return [line.split()[0] for line in self.told() if line.endswith(" placed")]

    def told(self) -> list[str]:
        file = self.folder / "told"
        return file.read_text().splitlines() if file.exists() else []

    def wait_for_orders(self, more: int = 20) -> None:
        """Until the web process has placed so many more."""
        reached = len(self.placed()) + more
        eventually(lambda: len(self.placed()) >= reached, within_seconds=90, what=lambda: self._state())

    def assert_each_order_has_one_effect(self) -> list[str]:
        """Every order of the database once, and no other effect; the orders."""
        self.bash("systemctl stop shop-web")
        orders = self.orders()
        expected = Counter(orders)
        eventually(
            lambda: self.effects() == expected,
            within_seconds=90,
            what=lambda: f"{self.effects() - expected}, {expected - self.effects()}\n{self._state()}",
        )
        return orders

    def _state(self) -> str:
        return "\n".join([*self.told()[-5:], self.logs()])

    # -- programs -----------------------------------------------------------------------------------

    def own(self, path: Path) -> None:
        os.chown(path, self.account.pw_uid, self.account.pw_gid)

    def use(self, programs: Path) -> None:
        """Let the blocks find PostgreSQL's programs of this version on the PATH."""
        write_programs(self.folder / "bin", programs, self.account)

    def _write(self, name: str, text: str) -> None:
        file = self.folder / "bin" / name
        file.write_text(text)
        file.chmod(0o755)
