"""A killed consumer process: its supervisor releases its leases at once, in any state of the process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from outbox.broker import deaths
from outbox.broker.consumer.running_calls import LastCalls
from outbox.broker.supervisor import ChildDeath, Supervisor
from outbox.subscription import Subscription
from outbox.utils.backoff import Backoff
from tests.broker.bench import FIFO, ConsumptionBench, Seen
from tests.broker.consumer.test_quarantine import messages, working
from tests.support import eventually

# Far longer than this test waits for anything: only a release lets another consumer have the queues.
LEASE_SECONDS = 600.0
HANDLER_SECONDS = 600.0
NEVER = Backoff(first_seconds=3600.0, longest_seconds=3600.0)


def kill_at_work(bench: ConsumptionBench, supervisor: Supervisor) -> None:
    os.kill(supervisor.pids()["c1"], signal.SIGKILL)


def kill_while_it_drains(bench: ConsumptionBench, supervisor: Supervisor) -> None:
    """Kill it as an operator or the kernel does in a rolling restart, while handlers run."""
    pid = supervisor.pids()["c1"]
    os.kill(pid, signal.SIGTERM)
    eventually(lambda: len(bench.owners()) == 1, what="it has released the idle queue, so it drains")
    os.kill(pid, signal.SIGKILL)


def kill_after_the_time_to_drain(bench: ConsumptionBench, supervisor: Supervisor) -> None:
    """The supervisor kills what did not drain in time."""
    supervisor.stop()


@pytest.mark.parametrize(
    "end",
    [
        kill_at_work,
        *(pytest.param(end, marks=pytest.mark.slow) for end in (kill_while_it_drains, kill_after_the_time_to_drain)),
    ],
)
def test_another_consumer_takes_the_queues_of_a_killed_one(
    bench: ConsumptionBench, tmp_path: Path, end: Callable[[ConsumptionBench, Supervisor], None]
) -> None:
    bench.declare("orders", queues=2, types=FIFO)
    options: dict[str, Any] = {
        "lease_seconds": LEASE_SECONDS,
        "seconds": HANDLER_SECONDS,
        "timeout_seconds": 2 * HANDLER_SECONDS,
    }
    # The killed child is not restarted: only the release lets the other consumer own more than its share.
    with working(bench, tmp_path, drain_seconds=0.5, backoff=NEVER, **options) as workers:
        eventually(lambda: bench.shares() == [2])
        bench.publish(messages(8, keys=1))
        eventually(lambda: sum(workers.calls().values()) == 4, what="its threads handle messages")
        [dead] = set(bench.owners().values())
        end(bench, workers.supervisor)
        heir = Seen()
        with bench.running((Subscription(group="g", topic="orders"), heir), lease_seconds=LEASE_SECONDS):
            eventually(lambda: bench.shares() == [2] and dead not in bench.owners().values(), what="it has the queues")
            eventually(lambda: sorted(heir.ns) == list(range(8)), what="it has handled what the other one held")
            assert quarantined(bench) == (4 if end is kill_at_work else 0), (
                "a process that was stopped puts no message into quarantine"
            )
            assert members_of(bench, dead) == 0


def quarantined(bench: ConsumptionBench) -> int:
    # A message leaves quarantine as soon as its handler has returned; the incident stays.
    rows = bench.rows("SELECT detail FROM outbox.incident WHERE kind = 'process_died'")
    return sum(int(detail.split(" messages")[0].split()[-1]) for (detail,) in rows)


def members_of(bench: ConsumptionBench, instance: UUID) -> int:
    (count,) = bench.rows("SELECT count(*) FROM outbox.consumer WHERE instance_id = %s", instance)[0]
    return int(count)


def test_a_recorded_death_is_on_the_disk(bench: ConsumptionBench) -> None:
    bench.connection.execute("""
        CREATE TABLE committed_with (setting text);
        CREATE FUNCTION note_setting() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN INSERT INTO committed_with VALUES (current_setting('synchronous_commit')); RETURN NULL; END $$;
        CREATE CONSTRAINT TRIGGER note_setting AFTER INSERT ON outbox.incident DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION note_setting();
    """)
    left = LastCalls(instance=uuid4(), told_to_stop=False, calls=[])
    deaths.record(bench.database, ChildDeath(child="consumer-1", how="signal SIGKILL", hung=False, left_behind=left))
    assert bench.rows("SELECT setting FROM committed_with") == [("on",)]
