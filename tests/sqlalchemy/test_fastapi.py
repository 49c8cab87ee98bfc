"""The program and the commands of docs/sqlalchemy.md, with both drivers of the page."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from outbox.contrib.sqlalchemy.installation import main
from tests.sqlalchemy.support import stored, url_of

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "sqlalchemy.md").read_text(encoding="utf-8")
# The database refuses an amount of 0 at COMMIT, after the message was published.
PLACE = """
import asyncio, json, sys
import httpx
from shop import app

async def place():
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as http:
        asked = [http.post("/orders", json={"number": f"A-{number}", "amount": number % 10}) for number in range(20)]
        answers = [*await asyncio.gather(*asked), await http.post("/orders", json={"number": "A-1", "amount": 1})]
    print(json.dumps([answer.status_code for answer in answers]))

asyncio.run(place())
"""


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_the_page_stores_rows_with_their_messages(
    driver: str, tmp_path: Path, new_database: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert main(shlex.split(commands[1].replace("$DATABASE_URL", url_of(url)))) == 0
    assert "topic 'order.placed' is declared" in capsys.readouterr().out
    environment = {**os.environ, "DATABASE_URL": url_of(url, driver), "PYTHONPATH": f"{ROOT}:{tmp_path}"}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("shop.py")
    good = sorted(f"A-{number}" for number in range(20) if number % 10)
    assert json.loads(run("-c", PLACE)) == [201 if number % 10 else 409 for number in range(20)] + [409]
    with psycopg.connect(url, autocommit=True) as connection:
        assert stored(connection) == (good, good)
