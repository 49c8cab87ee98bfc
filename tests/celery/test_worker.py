"""`celery worker --outbox`: real workers, real children, real signals."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.celery.project import Project
from tests.support import eventually

LEASES = "OUTBOX |= {'LEASE_SECONDS': 5}\n"
PAY = "from shop.services import pay\nfor number in range(%d, %d):\n    pay(str(number))\n"
UNOWNED = (
    "SELECT max(extract(epoch FROM clock_timestamp() - expires_at))::float FROM outbox.queue_lease"
    " WHERE owner IS NULL OR expires_at < clock_timestamp()"
)


def children(worker: subprocess.Popen[bytes]) -> dict[str, int]:
    """Roles and pids of the supervised children that are alive."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes().decode().split("\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == worker.pid and "outbox.contrib.django.worker.child" in command:
                found[command[3]] = int(entry.name)
    return found


def both_children(worker: subprocess.Popen[bytes], log: Path) -> dict[str, int]:
    return eventually(
        lambda: found if len(found := children(worker)) == 2 else {}, within_seconds=40, what=log.read_text
    )


def gone(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def ready(log: Path) -> None:
    eventually(lambda: "ready." in log.read_text(), within_seconds=40, what=log.read_text)


def slow_down(shop: Project, seconds: float) -> Path:
    """Let each handler work for so long in its transaction; returns a file that it makes before."""
    begun = shop.folder / "begun"
    path = shop.folder / "shop" / "subscribers.py"
    path.write_text(
        f"{path.read_text()}    open({str(begun)!r}, 'w').close()\n    __import__('time').sleep({seconds})\n"
    )
    return begun


def shipped(shop: Project) -> list[str]:
    return [text for text in shop.mails() if text.startswith("shipping")]


def test_killed_children_come_back_and_sigterm_drains(shop: Project) -> None:
    begun = slow_down(shop, 0.7)
    worker, log = shop.worker("--outbox")
    first = both_children(worker, log)
    for pid in first.values():
        os.kill(pid, signal.SIGKILL)
    second = eventually(
        lambda: found if len(found := children(worker)) == 2 and not set(found.values()) & set(first.values()) else {},
        within_seconds=40,
        what=log.read_text,
    )
    assert set(second) == set(first)
    shop.python(PAY % (1, 2))
    eventually(begun.exists, within_seconds=40, what=log.read_text)
    worker.terminate()
    assert worker.wait(40) == 0, log.read_text()
    assert all(map(gone, second.values()))
    assert shipped(shop) == ["shipping 1"]
    handled = "SELECT sum(handled) FROM outbox.offset_v1 WHERE consumer_group = 'logistics'"
    assert shop.rows(handled, outbox=True) == [(1,)]
    assert shop.rows("SELECT count(*) FROM outbox.queue_lease WHERE owner IS NOT NULL", outbox=True) == [(0,)]


def test_killed_worker_takes_its_children_with_it(shop: Project) -> None:
    worker, log = shop.worker("--outbox")
    found = both_children(worker, log)
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    for role, pid in found.items():
        eventually(lambda pid=pid: gone(pid), within_seconds=20, what=f"{role} outlives its worker")  # type: ignore[misc]


@pytest.mark.slow
@pytest.mark.parametrize("second", [pytest.param("QUIT", marks=pytest.mark.soak), "INT"])
def test_a_second_signal_ends_the_drain(shop: Project, second: str) -> None:
    """The handler runs for longer than this test may, and so may the drain."""
    shop.write("shop/settings.py", "OUTBOX |= {'DRAIN_SECONDS': 600, 'LEASE_SECONDS': 600}\n")
    begun = slow_down(shop, 600)
    worker, log = shop.worker("--outbox")
    found = both_children(worker, log)
    ready(log)
    shop.python(PAY % (1, 2))
    eventually(begun.exists, within_seconds=40, what=log.read_text)
    worker.send_signal(signal.SIGINT)
    eventually(lambda: "draining children" in log.read_text(), within_seconds=40, what=log.read_text)
    worker.send_signal(signal.Signals[f"SIG{second}"])
    worker.wait(60)
    assert all(map(gone, found.values()))
    assert "did not end" not in log.read_text()
    assert shipped(shop) == []


@pytest.mark.slow
def test_roles_choose_the_children(shop: Project) -> None:
    """Without the option a worker starts none."""
    wrong, said = shop.worker("--outbox-roles=brocker")
    assert wrong.wait(40) == 2
    assert "there is no role brocker; choose from broker, consumer" in said.read_text()
    for options, expected in ((["--outbox-roles=broker"], {"broker"}), ([], set())):
        worker, log = shop.worker(*options)
        ready(log)
        eventually(lambda worker=worker, expected=expected: set(children(worker)) == expected, what=log.read_text)  # type: ignore[misc]


@pytest.mark.slow
def test_two_workers_under_rebalance_one_process_tree_killed(shop: Project) -> None:
    """No queue is without an owner for longer than a lease term, and no effect happens twice."""
    shop.write("shop/settings.py", LEASES)
    slow_down(shop, 0.05)
    workers = [shop.worker("--outbox") for _ in range(2)]

    def state() -> str:
        tables = ("outbox.consumer", "outbox.queue_lease", "outbox.offset_v1", "pg_stat_activity")
        rows = [row for one in tables for row in shop.rows(f"SELECT row_to_json(t)::text FROM {one} t", outbox=True)]
        return "\n".join([*map(str, rows), *(log.read_text() for _, log in workers)])

    def owners() -> set[str]:
        return {owner for (owner,) in shop.rows("SELECT owner FROM outbox.queue_lease", outbox=True) if owner}

    both = [both_children(*one) for one in workers]
    eventually(lambda: len(owners()) == 2, within_seconds=40, what=state)
    with ThreadPoolExecutor(1) as pool:
        paying = pool.submit(shop.python, PAY % (0, 300))
        eventually(lambda: len(shipped(shop)) > 50, within_seconds=60, what=state)
        before, longest = owners(), 0.0
        for pid in both[0].values():
            os.kill(pid, signal.SIGKILL)
        os.killpg(workers[0][0].pid, signal.SIGKILL)
        [(paid,)] = shop.rows("SELECT count(*) FROM shop_order")
        assert len(shipped(shop)) < paid, "messages wait at the kill"
        shop.python(PAY % (300, 400))
        paying.result()

    def has_taken_over() -> bool:
        nonlocal longest
        [(seconds,)] = shop.rows(UNOWNED, outbox=True)
        longest = max(longest, seconds or 0.0)
        return len(set(shipped(shop))) == 400 and len(owners()) == 1

    eventually(has_taken_over, within_seconds=90, what=state)
    assert len(shipped(shop)) == 400
    assert owners() < before, "the queues of the killed worker changed their owner"
    assert longest <= 5
