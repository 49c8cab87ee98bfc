"""SIGKILL of a checker before and after its tombstone: the next one gives the same answer, and it is final."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import pytest
from django.db import IntegrityError, connections, transaction

from outbox import Check, Decision
from outbox.contrib.django.ledger import ledger
from outbox.utils import faults
from outbox.utils.ids import uuid7
from tests.django.test_barrier import answers, check, row

pytestmark = pytest.mark.usefixtures("empty_log")


def _killed(checks: Sequence[Check], step: str) -> bool:
    """Whether a checker in a process of its own was killed at this step."""
    child = os.fork()
    if child == 0:
        try:
            faults.arm(f"{step}=kill")
            answers(checks)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize(("step", "left"), [("check.before_tombstone", None), ("check.after_tombstone", "R")])
def test_killed_around_the_tombstone(step: str, left: str | None) -> None:
    checks = [check(uuid7()) for _ in range(3)]
    # Once the tombstones exist, no process reaches that step again.
    for _ in range(3 if left is None else 1):
        assert _killed(checks, step)
        assert {row("default", one.transaction_id) for one in checks} == {left}
    found = answers(checks)
    assert {found[one.transaction_id].decision for one in checks} == {Decision.ROLLBACK}
    for one in checks:
        with pytest.raises(IntegrityError), transaction.atomic():
            ledger.insert_committed(connections["default"], one.transaction_id)
