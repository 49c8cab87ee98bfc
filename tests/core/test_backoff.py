"""Backoff: growing pauses with a limit, started over after a healthy run."""

from __future__ import annotations

from outbox.utils.backoff import Backoff


def test_it_doubles_up_to_its_limit() -> None:
    backoff = Backoff(first_seconds=0.5, longest_seconds=3)
    assert [backoff.pause_seconds(failures) for failures in (1, 2, 3, 4, 1000)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_a_healthy_run_starts_over() -> None:
    backoff = Backoff(first_seconds=0.1, longest_seconds=2.0, healthy_seconds=10)
    assert backoff.failures_in_a_row(0, ran_seconds=0.0) == 1
    assert backoff.failures_in_a_row(4, ran_seconds=9.9) == 5
    assert backoff.failures_in_a_row(4, ran_seconds=10.0) == 1
