"""The demo as a whole: real processes, real kills, and figures that have to be right."""

from __future__ import annotations

import re
import signal
from email.utils import parsedate_to_datetime
from pathlib import Path

import pytest

from tests.sample.conftest import ORDERS, DemoRun

pytestmark = pytest.mark.slow


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
    assert "the process that sequences and consumes was killed (SIGKILL) in the payment of order" in output
    site = (open_demo.directory / "logs" / "site.log").read_text()
    assert site.count("was sent SIGKILL") >= 2
    worker = (open_demo.directory / "logs" / "worker.log").read_text()
    assert "child consumer-1 ended (signal SIGKILL)" in worker


def test_the_provider_charged_every_paid_order_once_although_a_process_died_in_a_payment(open_demo: DemoRun) -> None:
    output = open_demo.output
    paid = _figure(output, "orders paid")
    assert [_figure(output, name) for name in ("paid orders with one charge", "charges at the provider")] == [paid] * 2
    assert _figure(output, "killed in a payment, asked again") == 1
    assert _figure(output, "charges in the statement") == paid


def test_check_back_ran_through_beat_and_settled_what_the_killed_left(open_demo: DemoRun) -> None:
    output = open_demo.output
    assert _figure(output, "committed by check-back") >= 1
    assert _figure(output, "rolled back by check-back") >= 1
    worker = (open_demo.directory / "logs" / "worker.log").read_text()
    assert "Sending due task outbox.check_back" in worker


def _log(run: DemoRun, name: str) -> str:
    return (run.directory / "logs" / f"{name}.log").read_text(errors="replace")


def test_the_logs_of_all_processes_name_the_request_of_the_payment(open_demo: DemoRun) -> None:
    paid = re.search(r" (\w{12}) sample_project\.orders\.services: order (\d+) is paid", _log(open_demo, "site"))
    assert paid, _log(open_demo, "site")
    request, order = paid.groups()
    effects = re.findall(rf" {request} sample_project\.(\w+)\.subscribers: order {order} ", _log(open_demo, "worker"))
    assert sorted(effects) == ["logistics", "payments"]


def test_at_most_one_offer_is_mailed_in_a_second(open_demo: DemoRun) -> None:
    mailed = re.findall(r"Subject: Your next letter .*\nFrom: .*\nTo: .*\nDate: (.*)", _log(open_demo, "worker"))
    times = [parsedate_to_datetime(date) for date in mailed]
    assert len(times) >= 2
    # The limit counts the starts of the calls, and the Date of a mail has no fractions of a second.
    assert len(times) <= (times[-1] - times[0]).total_seconds() + 3


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_new_version_of_an_event_is_deployed_while_customers_pay(tmp_path: Path) -> None:
    """Old code meets new messages, new code meets old messages, and each order is handled once."""
    run = DemoRun(tmp_path, "--long", "--orders=24", "--shoppers=2")
    try:
        run.wait_for(r"all figures are right", within_seconds=540)
    finally:
        code = run.end()
    output = run.output
    assert code == 0, output
    paid, first, second = (
        _figure(output, name)
        for name in ("orders paid", "orders published as version 1", "orders published as version 2")
    )
    assert (first > 0, second > 0, first + second) == (True, True, paid)
    assert [_figure(output, name) for name in ("shipments", "points credited", "carts cleared")] == [paid] * 3
    assert [_figure(output, name) for name in ("lost", "invented", "doubled", "dead letters")] == [0] * 4
    assert _figure(output, "groups in which version 2 waited") >= 1
    assert _figure(output, "version 1 handled by new code") >= 1
    assert "no version above 1" in _log(run, "worker")
    assert run.left_running() == []


def test_an_interrupted_demo_leaves_nothing_running(tmp_path: Path) -> None:
    run = DemoRun(tmp_path, "--orders=2000", "--path=atomic")
    try:
        run.wait_for(r"2000 customers", within_seconds=60)
    finally:
        code = run.end(signal.SIGTERM)
    assert code == 130, run.output
    assert "all processes were stopped" in run.output
    assert run.left_running() == []
