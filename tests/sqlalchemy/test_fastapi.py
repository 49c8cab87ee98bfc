"""The program of docs/sqlalchemy.md, served by uvicorn processes that are killed while requests arrive."""

from __future__ import annotations

import asyncio
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psycopg
import pytest

from outbox.contrib.sqlalchemy.installation import main
from tests.sqlalchemy.support import stored, url_of

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "sqlalchemy.md").read_text(encoding="utf-8")


@pytest.fixture
def shop(tmp_path: Path, new_database: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder with the program of the page, whose command has installed the broker in a new database."""
    program = re.search(r"^```python\n(# shop\.py\n.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    commands = re.search(
        r'^python -m outbox\.contrib\.sqlalchemy (install "\$DATABASE_URL" .*)\npython shop\.py\n'
        r"python -m uvicorn shop:app\n```",
        PAGE,
        re.MULTILINE,
    )
    assert program is not None and commands is not None
    (tmp_path / "shop.py").write_text(program[1], encoding="utf-8")
    url = new_database()
    (tmp_path / "url").write_text(url, encoding="utf-8")
    assert main(shlex.split(commands[1].replace("$DATABASE_URL", url_of(url)))) == 0
    assert "topic 'order.placed' is declared" in capsys.readouterr().out
    return tmp_path


def environment(shop: Path, driver: str = "psycopg") -> dict[str, str]:
    url = (shop / "url").read_text(encoding="utf-8")
    return {**os.environ, "DATABASE_URL": url_of(url, driver), "PYTHONPATH": str(ROOT)}


class Servers:
    """The processes, as tests.sqlalchemy.serving prints them."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.running: list[int] = []
        self.killed = 0

    def read(self) -> None:
        """Read the id of one more process."""
        assert self._process.stdout is not None
        self.running.append(int(self._process.stdout.readline()))

    def kill(self) -> None:
        """Kill the oldest process, and wait until another has been started in its place."""
        os.kill(self.running.pop(0), signal.SIGKILL)
        self.killed += 1
        self.read()


@contextmanager
def serving(shop: Path, driver: str) -> Iterator[tuple[Servers, int]]:
    """Two processes, and the port of their socket."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listening:
        listening.set_inheritable(True)
        command = [sys.executable, "-m", "tests.sqlalchemy.serving", str(listening.fileno()), "2"]
        with subprocess.Popen(
            command,
            cwd=shop,
            env=environment(shop, driver),
            pass_fds=[listening.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            # Makes the table, while the servers import their libraries.
            made = subprocess.run([sys.executable, "shop.py"], cwd=shop, env=environment(shop, driver), timeout=60)
            assert made.returncode == 0
            servers = Servers(process)
            servers.read()
            servers.read()
            yield servers, listening.getsockname()[1]
            process.communicate(timeout=30)


def place_orders(servers: Servers, port: int, *, requests: int, kill_every: int) -> Counter[int]:
    """The statuses of the orders; one whose connection broke is placed again, as a client would do.

    One order of ten has an amount that the database refuses at COMMIT, after the message was published.
    """
    statuses: Counter[int] = Counter()
    numbers = iter(range(requests))
    rng = random.Random(5)

    async def client(http: httpx.AsyncClient) -> None:
        for number in numbers:
            order = {"number": f"A-{number}", "amount": 0 if number % 10 == 9 else rng.randint(1, 100)}
            while True:
                try:
                    answer = await http.post("/orders", json=order)
                    break
                except httpx.TransportError:
                    statuses[0] += 1
            statuses[answer.status_code] += 1
            if number % kill_every == kill_every // 2:
                servers.kill()

    async def run() -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            await asyncio.gather(*(client(http) for _ in range(16)))

    asyncio.run(run())
    return statuses


def check(shop: Path, driver: str, *, requests: int, kill_every: int) -> None:
    with serving(shop, driver) as (servers, port):
        statuses = place_orders(servers, port, requests=requests, kill_every=kill_every)
    assert servers.killed == requests // kill_every
    good = sorted(f"A-{number}" for number in range(requests) if number % 10 != 9)
    # An order is taken (409) if the process died after its COMMIT; the client then placed it again.
    assert statuses[201] + statuses[409] == requests and statuses[201] <= len(good)
    assert set(statuses) <= {0, 201, 409}
    with psycopg.connect((shop / "url").read_text(encoding="utf-8"), autocommit=True) as connection:
        assert stored(connection) == (good, good)
    print(f"{requests} requests with {driver}, {servers.killed} kills: {dict(statuses)}")


def test_what_killed_processes_leave_are_rows_with_their_messages(shop: Path) -> None:
    check(shop, "psycopg", requests=80, kill_every=80)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_2000_requests_with_kills_leave_rows_with_their_messages(shop: Path, driver: str) -> None:
    check(shop, driver, requests=2000, kill_every=100)
