"""The demo as a whole: real processes, real kills, and figures that have to be right."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from tests.sample.conftest import ORDERS, DemoRun


def _figure(output: str, name: str) -> int:
    found = re.search(rf"^{re.escape(name)}\s+([\d,]+)", output, re.MULTILINE)
    assert found, f"no figure {name!r} in:\n{output}"
    return int(found[1].replace(",", ""))


def test_every_paid_order_arrives_once_and_no_other_through_three_crashes(open_demo: DemoRun) -> None:
    output = open_demo.output
    paid = _figure(output, "orders paid")
    declined = _figure(output, "payments declined")
    unanswered = _figure(output, "payments without an answer")
    assert ORDERS - declined - unanswered <= paid <= ORDERS - declined
    assert [_figure(output, name) for name in ("shipments", "points credited", "carts cleared")] == [paid] * 3
    assert [_figure(output, name) for name in ("lost", "invented", "doubled", "dead letters")] == [0] * 4
    assert "WRONG" not in output


def test_web_processes_and_the_leader_were_really_killed(open_demo: DemoRun) -> None:
    output = open_demo.output
    assert "killed (SIGKILL) after its local commit" in output
    assert "killed (SIGKILL) before its local commit" in output
    assert "the process that sequences and consumes was killed (SIGKILL)" in output
    site = (open_demo.directory / "logs" / "site.log").read_text()
    assert site.count("was sent SIGKILL") >= 2
    worker = (open_demo.directory / "logs" / "worker.log").read_text()
    assert "child consumer-1 ended (signal SIGKILL)" in worker


def test_check_back_ran_through_beat_and_settled_what_the_killed_left(open_demo: DemoRun) -> None:
    output = open_demo.output
    assert _figure(output, "committed by check-back") >= 1
    assert _figure(output, "rolled back by check-back") >= 1
    worker = (open_demo.directory / "logs" / "worker.log").read_text()
    assert "Sending due task outbox.check_back" in worker


def test_an_interrupted_demo_leaves_nothing_running(tmp_path: Path) -> None:
    run = DemoRun(tmp_path, "--orders=2000", "--path=atomic")
    try:
        run.wait_for(r"2000 customers", within_seconds=60)
    finally:
        code = run.end(signal.SIGTERM)
    assert code == 130, run.output
    assert "all processes were stopped" in run.output
    assert run.left_running() == []
