"""The text of a crash test that has failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outbox.contrib.crash_kit.scenario_run import Plan
from outbox.contrib.crash_kit.steps import Step, failed_at, short

_LISTED: Final = 20


class CrashTestFailed(AssertionError):
    """The assertions of a crash test fail after a crash."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A run after which an assertion failed.

    `calls`: what the run's first process has done outside the databases. `commits`: its statements outside of a
    transaction. If a thread of a handler executes one, the process may be killed at a step of the other thread.
    """

    plan: Plan
    error: Exception
    calls: Sequence[Step]
    commits: Sequence[Step]
    log: str


def report(failure: Failure, *, runs: int, steps: int, kills: int, seed: int) -> str:
    """Describe the first run after which an assertion failed."""
    return "\n".join(_lines(failure, f"run {runs}; {kills} kills at {steps} steps; seed {seed}"))


def _lines(failure: Failure, counts: str) -> Iterator[str]:
    yield f"{happened(failure.plan)} ({counts})"
    step = failure.plan.kill_at or failure.plan.pause_at
    yield from _placed(step.lines if step else [])
    yield from _listed("outside of the databases, this process had done:", failure.calls)
    yield from _listed("outside of a transaction, it had sent these statements:", failure.commits)
    yield "then everything settled, and the assertions failed:"
    yield from (f"    {line}" for line in f"{type(failure.error).__name__}: {failure.error}".splitlines())
    yield from _placed([failed_at(failure.error)])
    if failure.log:
        yield "the last process printed:"
        yield from (f"    {line}" for line in failure.log.splitlines()[-_LISTED:])


def _listed(title: str, steps: Sequence[Step]) -> Iterator[str]:
    folder = Path.cwd()
    if lines := [f"    {step.name} at {short(line, folder)}" for step in steps for line in step.lines[:1]]:
        yield from (title, *dict.fromkeys(lines))


def happened(plan: Plan) -> str:
    """Say in one line what the kit did in a run."""
    if plan.kill_at is not None:
        return f"killed {_named(plan.kill_at)}"
    if plan.pause_at is not None:
        return f"another handler ran between this and the next step: {_named(plan.pause_at)}"
    twice = "each message delivered twice" if plan.duplicates else ""
    order = f"the order of seed {plan.seed}" if plan.seed is not None else ""
    return "the messages in " + order + (f", {twice}" if twice else "") if order else twice


def _named(step: Step) -> str:
    name = f"at {step.name}" if "." in step.name.split()[0] else step.name
    return name + (f" (visit {step.visit})" if step.visit > 1 else "")


def _placed(lines: Sequence[str]) -> Iterator[str]:
    folder = Path.cwd()
    return (f"    {short(line, folder)}" for line in lines if line)
