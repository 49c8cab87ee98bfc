"""The project of docs/celery.md, written to a folder unchanged, and its processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "celery.md"
BIN = Path(sys.executable).parent


def blocks(language: str) -> list[str]:
    """The code of the page in a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def files_of_the_page() -> dict[str, str]:
    """Path -> content: the code blocks that begin with a comment that names a file."""
    found = {}
    for block in blocks("python"):
        first = block.partition("\n")[0]
        assert re.fullmatch(r"# [\w/]+\.py", first), f"a block without a file name: {first}"
        found[first[2:]] = block
    return found


@dataclass
class Project:
    """A folder with the project, its two databases, and what runs of it."""

    folder: Path
    database_url: str
    outbox_url: str
    transport: str
    _programs: Path = BIN
    _found: dict[str, str] = field(init=False)
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """The checkout, and what lets code that a test adds run from anywhere."""
        paths = f"{self.folder}{os.pathsep}{ROOT}"
        self._found = {"PYTHONPATH": paths, "DJANGO_SETTINGS_MODULE": "shop.settings"}

    def write(self, path: str, text: str) -> None:
        """Add a file, or to a file."""
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("a") as file:
            file.write(textwrap.dedent(text))

    def use_only(self, programs: Path) -> None:
        """Use an installed environment, and nothing of this checkout."""
        self._programs, self._found = programs, {}

    def environment(self, **more: str) -> dict[str, str]:
        """The environment of its processes."""
        foreign = ("DJANGO_", "OUTBOX_", "CELERY", "PYTHON")
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith(foreign)},
            "PATH": f"{self._programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONUNBUFFERED": "1",
            **self._found,
            "DATABASE_URL": self.database_url,
            "OUTBOX_DATABASE_URL": self.outbox_url,
            "CELERY_BROKER_URL": self.transport,
            **more,
        }

    def is_healthy(self) -> bool:
        """Whether the worker that was started has begun to lead."""
        return self._run("python manage.py outbox_status --probe").returncode == 0

    def _run(self, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-ec", script],
            cwd=self.folder,
            env=self.environment(**environment),
            capture_output=True,
            text=True,
            check=False,
        )

    def shell(self, script: str, **environment: str) -> str:
        """Run lines of the page; returns what they print."""
        done = self._run(script, **environment)
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def python(self, code: str, *, status: int = 0, **environment: str) -> str:
        """Run Python with Django set up; returns what it prints."""
        done = subprocess.run(
            [sys.executable, "-c", f"import django; django.setup()\n{textwrap.dedent(code)}"],
            cwd=self.folder,
            env=self.environment(**environment),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status, f"{code}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def start(self, *arguments: str, **environment: str) -> tuple[subprocess.Popen[bytes], Path]:
        """Start a process of the project; returns it and its log."""
        log = self.folder / f"process-{len(self._started)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                list(arguments),
                cwd=self.folder,
                env=self.environment(**environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(process)
        return process, log

    def worker(self, *options: str, **environment: str) -> tuple[subprocess.Popen[bytes], Path]:
        """Start a Celery worker with one slot."""
        command = ["celery", "-A", "shop", "worker", "--without-gossip", "--without-mingle", "--loglevel=INFO"]
        command += ["--concurrency=1"]
        return self.start(*command, *options, **environment)

    def stop(self) -> None:
        """End what was started; supervised processes follow their worker."""
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._started.clear()

    def rows(self, query: str, *, outbox: bool = False) -> list[tuple[Any, ...]]:
        """Look into a database."""
        with psycopg.connect(self.outbox_url if outbox else self.database_url) as connection:
            return connection.execute(query.encode()).fetchall()

    def mails(self) -> list[str]:
        """The recorded calls of the tasks and subscribers."""
        return sorted(text for (text,) in self.rows("SELECT text FROM shop_mail"))

    def deciders(self) -> dict[str | None, int]:
        """How many half transactions each kind of decider settled; None for those that are open."""
        query = (
            "SELECT decided_by::text, count(*) FROM outbox.commit_log LEFT JOIN outbox.op_log USING (transaction_id)"
            " WHERE half GROUP BY 1"
        )
        return dict(self.rows(query, outbox=True))


def write_page(folder: Path) -> None:
    """Write the files of the page."""
    for path, text in files_of_the_page().items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
