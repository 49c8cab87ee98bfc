"""A process that starts takes over what a dead process of its machine still holds, and nothing of a living one."""

from __future__ import annotations

import subprocess
import sys
from uuid import UUID, uuid4

import pytest

from outbox.broker.groups import leases, members
from outbox.broker.sequencer.leader_lease import LeaderLease
from outbox.subscription import Subscription
from tests.broker.bench import ConsumptionBench

_TELL = "from outbox.utils.process_identity import process_identity; print(process_identity())"
LIFE = UUID(int=0)


@pytest.mark.parametrize("is_dead", [True, False])
def test_the_queues_and_the_lead_of_a_neighbour(
    bench: ConsumptionBench, monkeypatch: pytest.MonkeyPatch, is_dead: bool
) -> None:
    bench.declare("orders", queues=3)
    runtime = bench.runtime((Subscription(group="g", topic="orders"), lambda delivery: None))
    runtime._session().finish()
    ((group_id,),) = bench.rows("SELECT group_id FROM outbox.consumer_group")
    queue_ids = [queue_id for (queue_id,) in bench.rows("SELECT queue_id FROM outbox.queue")]
    neighbour = uuid4()
    with monkeypatch.context() as patched:
        if is_dead:
            ended = subprocess.run([sys.executable, "-c", _TELL], capture_output=True, text=True, check=True)
            patched.setattr(members, "process_identity", ended.stdout.strip)
        members.heartbeat(bench.run, neighbour, {group_id: ["orders"]}, term_seconds=600)
    leases.acquire(bench.run, neighbour, group_id, queue_ids, life=LIFE, term_seconds=600)
    LeaderLease("outbox", neighbour, term_seconds=600).acquire_or_renew(bench.run.connection)

    session = runtime._session()
    try:
        assert set(bench.rows("SELECT owner FROM outbox.queue_lease")) == {(None if is_dead else neighbour,)}
        assert bench.rows("SELECT owner FROM outbox.leader_lease") == [(None if is_dead else neighbour,)]
        assert bench.rows("SELECT count(*) FROM outbox.consumer WHERE instance_id = %s", neighbour) == [
            (int(not is_dead),)
        ]
    finally:
        session.finish()
