"""The leader of a broker that tests consume from: a consumer process, or the broker process."""

from __future__ import annotations

import uuid

from outbox.broker.leading import LeaderSettings, LeadingConsumer
from tests.broker.bench import ConsumptionBench

STANDING_IN = LeaderSettings(stands_in=True, maintenance_seconds=1.0)


def leading(bench: ConsumptionBench) -> LeadingConsumer:
    return LeadingConsumer(bench.database, settings=LeaderSettings(maintenance_seconds=1.0))


def leader(bench: ConsumptionBench) -> uuid.UUID | None:
    rows = bench.rows("SELECT owner FROM outbox.leader_lease WHERE expires_at > clock_timestamp()")
    return rows[0][0] if rows else None


def led_by_consumer(bench: ConsumptionBench) -> bool:
    return leader(bench) in {instance for (instance,) in bench.rows("SELECT instance_id FROM outbox.consumer")}
