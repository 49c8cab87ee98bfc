"""The protocol of the barrier as a small model, explored exhaustively."""

from __future__ import annotations

import itertools

from outbox import Decision


def explore(*, tombstone: bool, immunity: bool = True) -> list[tuple[str, ...]]:
    """All interleavings of one local transaction and one check-back; the schedules that end in a contradiction.

    The local transaction inserts its row, then commits (or rolls back). The checker reads; where it finds
    nothing it inserts a tombstone (unless broken), which fails while the other's row is uncommitted.
    """
    bad = []
    for outcome in ("commit", "rollback"):
        local = ("insert", outcome)
        for positions in itertools.combinations(range(4), 2):
            schedule = ["check"] * 4
            for position, step in zip(positions, local, strict=True):
                schedule[position] = step
            committed: str | None = None
            pending = collided = False
            answer = Decision.UNKNOWN
            read_nothing = False
            for step in schedule:
                if step == "insert":
                    collided = committed is not None
                    pending = not collided
                elif step in ("commit", "rollback"):
                    committed = "C" if pending and step == "commit" else committed
                    pending = False
                elif answer is not Decision.UNKNOWN:
                    continue
                elif not read_nothing:
                    answer = {"C": Decision.COMMIT, "R": Decision.ROLLBACK}.get(committed or "", Decision.UNKNOWN)
                    read_nothing = committed is None
                elif not tombstone:
                    answer = Decision.ROLLBACK
                elif not pending:
                    answer = {"C": Decision.COMMIT, None: Decision.ROLLBACK, "R": Decision.ROLLBACK}[committed]
                    committed = committed or "R"
            wrong = Decision.ROLLBACK if committed == "C" else Decision.COMMIT
            if answer is wrong:
                bad.append(tuple(schedule))
    return bad


def test_model_of_the_barrier() -> None:
    assert explore(tombstone=True) == []


def test_the_model_finds_the_broken_variant_without_tombstone() -> None:
    assert ("check", "check", "insert", "commit") in explore(tombstone=False)
    assert ("insert", "check", "check", "commit") in explore(tombstone=False)
