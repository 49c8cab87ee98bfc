"""The children log where the worker logs, and each line has its time and its process."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.celery.project import Project
from tests.support import eventually

pytestmark = pytest.mark.parametrize("shop", ["sqlalchemy"], indirect=True)
LINE = r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+: INFO/outbox-%s:(\d+)\] \S+: %s starts$"
BROKER, CONSUMER = (
    re.compile(LINE % pair, re.MULTILINE) for pair in (("broker\\+check", "broker and check"), ("consumer", "consumer"))
)


@pytest.mark.slow
def test_a_detached_worker_has_the_logs_of_its_children_in_its_file(shop: Project) -> None:
    log, pid = shop.folder / "celery-w.log", shop.folder / "celery.pid"
    process, said = shop.worker(
        "--outbox", "--hostname=w@%h", "--detach", "--logfile=celery-%n.log", f"--pidfile={pid}"
    )
    assert process.wait(60) == 0, said.read_text()
    try:
        eventually(log.exists, within_seconds=60)
        found = eventually(
            lambda: (
                (BROKER.search(log.read_text()), CONSUMER.search(log.read_text()))
                if BROKER.search(log.read_text()) and CONSUMER.search(log.read_text())
                else None
            ),
            within_seconds=60,
            what=log.read_text,
        )
        assert found
    finally:
        worker = int(eventually(lambda: pid.read_text().strip()))
        os.kill(worker, signal.SIGTERM)
    eventually(lambda: not pid.exists(), within_seconds=60, what=log.read_text)
    assert "broker and check drained and ends" in log.read_text()


@pytest.mark.slow
def test_in_the_foreground_each_line_has_time_level_and_pid(shop: Project) -> None:
    worker, log = shop.worker("--outbox")
    for pattern in (BROKER, CONSUMER):
        line = eventually(lambda p=pattern: p.search(log.read_text()), within_seconds=60, what=log.read_text)  # type: ignore[misc]
        assert int(line.group(1)) != worker.pid
    assert "duplicate key" not in log.read_text(), "nor does a healthy start log an error of PostgreSQL"


@pytest.mark.slow
def test_a_worker_with_default_options_logs_what_outbox_starts_and_its_errors(shop: Project) -> None:
    """Without --loglevel, Celery's worker logs nothing below WARNING."""
    shop.write("shop/subscribers.py", "import logging; logging.getLogger(__name__).warning('look out')\n")
    _, log = shop.start("celery", "-A", "shop", "worker", "--outbox", "--without-gossip", "--without-mingle")
    says = re.compile(r"outbox starts broker, consumer-1; it consumes .*order\.paid for group logistics", re.MULTILINE)
    warns = re.compile(r"WARNING/outbox-consumer:\d+\] shop\.subscribers: look out$", re.MULTILINE)
    for pattern in (says, warns):
        eventually(lambda p=pattern: p.search(log.read_text()), within_seconds=60, what=log.read_text)  # type: ignore[misc]
    assert "duplicate key" not in log.read_text()
