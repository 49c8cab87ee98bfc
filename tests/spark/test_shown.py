"""The command prints no password and no character that controls the terminal. Needs neither Spark nor Java."""

from __future__ import annotations

import io

import pytest

from spark import cli
from spark.common.errors import RunIncomplete, UsageProblem
from spark.common.progress import Progress
from spark.sources import adbc

URL = "postgresql://shop:hunter2@host/db"
HOSTILE = "\x1b[2J\x9b31m\u202e"


@pytest.mark.parametrize(
    "url", ["postgresql://shop:a@hunter2@host/db", "host=h password=a hunter2", "postgresql://shop:%zzhunter2@host/db"]
)
def test_an_unreadable_url_is_not_repeated(url: str) -> None:
    with pytest.raises(Exception, match=r".") as caught:
        adbc.connect(url)
    assert "hunter2" not in adbc.one_line(caught.value)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageProblem(f"{HOSTILE} {URL}"), 2),
        (RunIncomplete(f"{HOSTILE} {URL}"), 3),
        (ValueError(f"{HOSTILE} {URL}"), 3),
    ],
)
def test_errors_are_inert(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr("spark.rules.file.load", fails)
    assert cli.main(["check"]) == code
    shown = capsys.readouterr().err
    assert shown.replace("\n", "").isprintable()
    assert r"\x1b[2J\x9b31m\u202e" in shown
    assert "hunter2" not in shown


def test_progress_is_inert() -> None:
    stream = io.StringIO()
    Progress(stream).say(HOSTILE)
    assert stream.getvalue().strip("\n").isprintable()
