"""The event of the shop: what the code before the change publishes, and what the code of today reads."""

from __future__ import annotations

import subprocess
import sys

from tests.sample.conftest import ROOT

PROGRAM = """
from datetime import UTC, datetime
from decimal import Decimal
from outbox.codec import JsonCodec
from outbox.events.declaration import find_event, read_event
from sample_project.events.order_paid import OrderPaid
from sample_project.events.order_paid_before import OrderPaid as Before

given = {"order_id": 7, "customer": "kate", "total": Decimal("16.80"), "paid_at": datetime(2026, 1, 31, tzinfo=UTC)}
old, today = Before.of(**given), OrderPaid.of(**given)
declared = find_event(Before)
assert old.amount == today.amount
codec = JsonCodec()
stored = codec.decode(codec.encode(declared.body_of(old)))
assert read_event((OrderPaid,), declared.topic, declared.headers, stored) == today
# A message from before the types has no headers.
plain = {"order_id": 7, "customer": "kate", "total": "16.80", "paid_at": given["paid_at"].isoformat()}
assert read_event((OrderPaid,), declared.topic, {}, plain) == today
"""


def test_code_of_today_reads_what_the_code_before_the_change_publishes() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
