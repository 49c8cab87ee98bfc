"""The site of the documents builds without a warning, and its pages, its search and its reference are there."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

import outbox.contrib.django
from outbox import errors
from outbox.contrib.django import message, subscriber, transactional_message
from outbox.contrib.django.operations.known_conditions import catalogue
from spark.judging.remedies import REMEDIES
from spark.rules.rule import FAULTS, FindingClass
from tests.part_apps import command_files
from tests.wheel import ROOT

# The functions whose parameters the reference shows.
FUNCTIONS = (outbox.contrib.django.publish, message, subscriber, transactional_message)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "docs", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


def text(site: Path, page: str) -> str:
    return (site / page).read_text(encoding="utf-8")


def test_every_page_is_on_the_site_and_can_be_searched(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert len(pages) > 90
    assert sorted(page.as_posix() for page in pages if not (site / page).is_file()) == []
    assert "tutorial" in text(site, "searchindex.js")


def test_the_reference_has_what_the_code_has(site: Path) -> None:
    classes = [kind for kind in vars(errors).values() if isinstance(kind, type) and kind.__module__ == errors.__name__]
    named = {
        "python#commands": [path.stem for path in command_files()],
        "conditions": list(catalogue()),
        "python#errors": [kind.__name__ for kind in classes],
        "conditions#metrics": [
            "outbox_condition",
            "outbox_published_messages_total",
            "outbox_lag_messages",
            "outbox_dead_messages_total",
        ],
        "python": [
            *(f'id="outbox.{name}"' for name in outbox.__all__),
            *(f'id="outbox.contrib.django.{name}"' for name in outbox.contrib.django.__all__),
            *(f'<span class="pre">{name}</span>' for one in FUNCTIONS for name in inspect.signature(one).parameters),
        ],
    }
    missing = {
        (page, name)
        for page, names in named.items()
        for shown in [text(site, f"reference/{page.partition('#')[0]}.html")]
        for name in names
        if name not in shown
    }
    assert missing == set() and all(named.values())


def test_the_page_of_findings_has_every_class_with_its_remedy(site: Path) -> None:
    page = unescape(re.sub(r"<[^>]+>", "", text(site, "reconciliation/findings.html")))
    words = " ".join(page.replace("’", "'").split())
    for name in (*FAULTS, FindingClass.EXPIRED):
        assert name.value in words
        told = (REMEDIES[name].check, REMEDIES[name].settle)
        assert all(" ".join(one.replace("`", "").split()) in words for one in told)


def test_the_list_for_language_models_has_every_page_and_its_text(site: Path) -> None:
    pages = sorted((ROOT / "docs").rglob("*.md"))
    listed, full = text(site, "llms.txt"), text(site, "llms-full.txt")
    names = [page.relative_to(ROOT / "docs") for page in pages]
    assert [name for name in names if f"({name.with_suffix('.html').as_posix()})" not in listed] == []
    assert [page for page in pages if page.read_text(encoding="utf-8") not in full] == []


def test_no_page_needs_a_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        assert 'src="http' not in page.read_text(encoding="utf-8"), page
