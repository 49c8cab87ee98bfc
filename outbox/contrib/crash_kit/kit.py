"""The crash kit: which runs a crash test has, and the judgement after each.

    undisturbed ──steps──► one run per step, killed there ──► one run per read, paused there ──► runs in other orders
         │                          │                                   │                               │
         └──────────────────────────┴── everything settles, then the assertions of the test ────────────┘

Each run has its own processes and begins with the rows that the databases had before the first run.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from django.core import mail
from django.db import connections
from django.test.utils import override_settings

# The engine imports these modules when it first needs them. They are imported here, before the fork, so that the child
# process of each run has them already.
from outbox.contrib.crash_kit.baseline import Baseline
from outbox.contrib.crash_kit.outside import OutsideCalls
from outbox.contrib.crash_kit.processes import Ended, run_in_child
from outbox.contrib.crash_kit.scenario_run import Plan, Surroundings, run_plan, settle_after_kill
from outbox.contrib.crash_kit.steps import Step, chosen, failed_at, read_steps, short
from outbox.contrib.django.engine.broker import flush, reset_broker
from outbox.errors import UsageError

logger = logging.getLogger(__name__)

_MAIL_BACKEND: Final = f"{OutsideCalls.__module__}.RecordingMailBackend"
# The runs in other orders. Each has a seed of its own.
_ORDERS: Final = 8


@dataclass
class CrashKit:
    """Runs crash tests. `reset_messages` empties the broker. `folder` is for the files of the runs.

    Call the object to run a crash test. `record` and `recorded` are for what the scenario does outside of the
    databases.
    """

    folder: Path
    aliases: Sequence[str]
    reset_messages: Callable[[], None]
    broker_schema: str
    groups: Sequence[str] = ()
    # The number of runs of the last crash test, and the steps that it has found.
    runs: int = 0
    steps: Sequence[Step] = ()
    # The steps at which no process was killed, because the run has not reached them again.
    missed: Sequence[Step] = ()
    _calls: OutsideCalls = field(init=False)

    def __post_init__(self) -> None:
        self._calls = OutsideCalls(self.folder / "calls")

    def record(self, name: str, value: Any = None) -> None:
        """Record a call to the outside, such as a charge. The record survives the kill. `value` is stored as JSON."""
        self._calls.record(name, value)

    def recorded(self, name: str) -> list[Any]:
        """Return the values that the last run has recorded under this name, in order."""
        return self._calls.values(name)

    def __call__(
        self,
        scenario: Callable[[], object],
        check: Callable[[], object],
        *,
        groups: Sequence[str] = (),
        kill_scenario: bool = True,
        shuffled: bool = False,
        duplicates: bool = False,
        seed: int = 0,
        every_visit: bool = False,
        most_kills: int = 200,
        within_seconds: float = 30.0,
    ) -> None:
        """Run the scenario once for each of its steps, with a process that is killed there, and check each outcome.

        `scenario` publishes messages. The kit also runs the subscribers of these messages. `check` has the assertions.
        They must hold after every crash: also if the kill prevented the scenario. Without `kill_scenario`, the kit
        kills only while handlers run, so `check` may assume that the scenario is complete. `groups` limits the
        subscribers. With `shuffled`, further runs deliver messages in other orders; with `duplicates`, a further run
        delivers each message twice. A line that several messages reach is one step; with `every_visit`, it is a step
        for each message. If there are more steps than `most_kills`, the kit chooses steps at random. The random
        choices depend on `seed`. `within_seconds` is the limit for one process.

        The crash test ends at the first step after which an assertion fails. Raises CrashTestFailed, an AssertionError.
        """
        began = time.monotonic()
        self.runs, self.missed = 0, []
        with self._prepared(scenario, groups or self.groups, kill_scenario, within_seconds) as shared:
            self._undisturbed(shared, check)
            found = self.steps = read_steps(shared.steps_file)
            kills = chosen(found, most_kills, every_visit=every_visit, seed=seed)
            for plan in _plans(found, kills, shuffled, duplicates, seed):
                failure = self._failure(shared, plan, check)
                if failure is not None:
                    text = report(failure, runs=self.runs, steps=len(found), kills=len(kills), seed=seed)
                    raise CrashTestFailed(text) from failure.error
        done = len(kills) - len(self.missed)
        logger.info("%s runs, %s kills at %s steps, %.1f s", self.runs, done, len(found), time.monotonic() - began)
        if self.missed:
            logger.warning(
                "%s of %s steps were not tested, because the run that should be killed there did not reach them. "
                "The scenario or a handler does not do the same in each run: look for times, random values, and state "
                "outside of the databases. The first of these steps: %s",
                len(self.missed),
                len(kills),
                "; ".join([happened(Plan(kill_at=self.missed[0])), *self.missed[0].lines]),
            )

    @contextmanager
    def _prepared(
        self, scenario: Callable[[], object], groups: Sequence[str], kill_scenario: bool, within_seconds: float
    ) -> Iterator[Surroundings]:
        with ExitStack() as stack:
            stack.enter_context(override_settings(EMAIL_BACKEND=_MAIL_BACKEND))
            OutsideCalls.current = self._calls
            stack.callback(setattr, OutsideCalls, "current", None)
            baseline = Baseline(self.aliases, broker_schema=self.broker_schema)
            stack.callback(baseline.close)
            shared = Surroundings(
                scenario=scenario,
                groups=groups,
                kill_scenario=kill_scenario,
                calls=self._calls,
                baseline=baseline,
                steps_file=self.folder / "steps",
                within_seconds=within_seconds,
            )
            yield shared

    def _undisturbed(self, shared: Surroundings, check: Callable[[], object]) -> None:
        ended = self._run(shared, Plan())
        if not ended.finished:
            raise UsageError(f"the scenario fails without any crash. Its process has printed:\n{ended.log}")
        if (error := self._judge(check)) is not None:
            raise CrashTestFailed(
                f"the assertions fail without any crash: {type(error).__name__}: {error}\n{ended.log}"
            ) from error

    def _failure(self, shared: Surroundings, plan: Plan, check: Callable[[], object]) -> Failure | None:
        """Run a plan, and return what was wrong afterwards, or None."""
        logger.info("crash test, run %s: %s", self.runs + 1, happened(plan))
        ended = self._run(shared, plan)
        if ended.was_killed:
            ended = run_in_child(
                lambda: settle_after_kill(shared), log=self.folder / "log", within_seconds=shared.within_seconds + 5
            )
        elif plan.kill_at is not None and ended.finished:
            self.missed = [*self.missed, plan.kill_at]
        steps = read_steps(shared.steps_file)
        error = self._judge(check) if ended.finished else _unsettled(ended, shared)
        if error is None:
            return None
        calls = [step for step in steps if step.name.startswith("after the call")]
        commits = [step for step in steps if step.commits and step != plan.kill_at]
        return Failure(plan, error, calls, commits, ended.log)

    def _run(self, shared: Surroundings, plan: Plan) -> Ended:
        self.runs += 1
        flush()
        reset_broker()
        shared.baseline.restore()
        self.reset_messages()
        self._calls.clear()
        shared.steps_file.unlink(missing_ok=True)
        reset_broker()
        connections.close_all()
        return run_in_child(
            lambda: run_plan(shared, plan), log=self.folder / "log", within_seconds=2 * shared.within_seconds + 5
        )

    def _judge(self, check: Callable[[], object]) -> Exception | None:
        mail.outbox = self._calls.mails()
        try:
            check()
        except Exception as error:
            logger.debug("the assertions failed:\n%s", traceback.format_exc())
            return error
        finally:
            connections.close_all()
        return None


def _unsettled(ended: Ended, shared: Surroundings) -> UsageError:
    if not ended.in_time:
        return UsageError(
            f"the process that handles the messages has not ended within {shared.within_seconds:g} s, because a "
            "handler waits or the machine is busy. Look for a handler that waits, or pass a larger `within_seconds`."
        )
    return UsageError(
        f"the process that handles the messages has ended with status {ended.status}, because of the error that it "
        "has printed last (below). Correct the handler or the scenario that raises this error."
    )


def _plans(found: Sequence[Step], kills: Sequence[Step], shuffled: bool, duplicates: bool, seed: int) -> Iterator[Plan]:
    for step in kills:
        yield Plan(kill_at=step)
    # After a read, a second call of this handler or a call of another handler may change the rows.
    several_handlers = len({step.handler for step in found if step.handler}) > 1
    visited_again = {replace(step, visit=1) for step in found if step.visit == 2}
    for step in found:
        if step.reads and step.visit == 1 and (several_handlers or step in visited_again):
            yield Plan(pause_at=step)
    if shuffled:
        for number in range(_ORDERS):
            yield Plan(seed=seed + number, duplicates=duplicates)
    elif duplicates:
        yield Plan(duplicates=True)


# -- the report ------------------------------------------------------------------------------------


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
