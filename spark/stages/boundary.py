"""Which rows a run judges: from where the previous result ended up to the watermark less the rule's grace."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final

from ..comparison.classify import Window
from ..errors import RunIncomplete, UsageProblem
from ..options import RunOptions
from ..output.result import RuleRun
from ..rules.rule import Rule
from ..sources.base import SourceBoundary

# How much older than its row's time a half message is taken to be at most, where retention has removed messages.
HALF_AGE: Final = timedelta(seconds=60)


def window(rule: Rule, options: RunOptions, readings: list[SourceBoundary], previous: dict[str, Any] | None) -> Window:
    """The rule's window. Raises RunIncomplete for an interval that is not over yet, or when nothing tells the time."""
    known = [reading.watermark for reading in readings if reading.watermark is not None]
    if not known:
        raise RunIncomplete("no source says up to when it is complete: there is no time in any of them.")
    watermark = min(known if options.no_later_than is None else [*known, options.no_later_than])
    boundary = watermark - timedelta(seconds=rule.grace_seconds)
    since, until = options.since, options.until
    if until is not None:
        if until > boundary:
            raise RunIncomplete(
                f"rule {rule.name!r}: the interval ends at {until.isoformat()}, but only rows before "
                f"{boundary.isoformat()} can be judged yet (watermark {watermark.isoformat()} less the grace "
                f"period). Run it again later."
            )
        boundary = until
    if since is None and previous is not None and not options.full:
        since = _end_of(previous, rule)
    if since is not None and until is None:
        boundary = max(boundary, since)
        back = _look_back(rule, options, boundary, known_rule(previous, rule))
        since = since if back is None else min(since, boundary - back)
    return Window(since, boundary, watermark, is_exact=until is not None)


def _look_back(
    rule: Rule, options: RunOptions, boundary: datetime, previous: dict[str, Any] | None
) -> timedelta | None:
    """How far before `boundary` rows are judged again; None where no look back is asked for, and none is due."""
    seconds = rule.look_back_seconds
    if options.look_back is not None:
        seconds = options.look_back.seconds or seconds
        if seconds is None:
            raise UsageProblem(
                f'rule {rule.name!r} does not say how far to look back: write look_back = "7d" in the rule, or '
                f"--look-back 7d."
            )
        return timedelta(seconds=seconds)
    last = None if previous is None else previous.get("looked_back")
    every = timedelta(seconds=rule.look_back_every_seconds)
    if seconds is None or (last is not None and boundary - datetime.fromisoformat(last["at"]) < every):
        return None
    return timedelta(seconds=seconds)


def limit_by_retention(run: RuleRun, horizon: datetime) -> None:
    """Judge no row whose message may be gone: it may have been stored, and removed, some time before the row's time."""
    floor = horizon + max(HALF_AGE, run.rule.longest_wait)
    since = run.window.since
    run.window = replace(run.window, floor=floor)
    if since is None or since < floor:
        run.window = replace(run.window, since=floor)
        run.notes.append(
            f"retention: messages stored before {horizon.isoformat()} may be gone, rows before "
            f"{floor.isoformat()} are not judged"
        )


def _end_of(previous: dict[str, Any], rule: Rule) -> datetime | None:
    """Where the previous result ended for this rule; None when it is new or was changed."""
    known = known_rule(previous, rule)
    return None if known is None else datetime.fromisoformat(known["until"])


def known_rule(previous: dict[str, Any] | None, rule: Rule) -> dict[str, Any] | None:
    """What the previous result says of the rule; None when it is new or was changed."""
    for known in [] if previous is None else previous["rules"]:
        if known["name"] == rule.name and known["digest"] == rule.digest:
            found: dict[str, Any] = known
            return found
    return None


def looked_back(run: RuleRun, previous: dict[str, Any] | None) -> dict[str, str | None] | None:
    """When rows that earlier runs had judged were last judged again (`at`), and from where on (`from`; None: all).

    None in an interval, of which each run judges everything, and where none has looked back.
    """
    window, known = run.window, known_rule(previous, run.rule)
    if window.is_exact:
        return None
    before = None if known is None else datetime.fromisoformat(known["until"])
    if before is not None and window.since is not None and window.since >= before:
        last: dict[str, str | None] | None = (known or {}).get("looked_back")
        return last
    return {"at": window.until.isoformat(), "from": None if window.since is None else window.since.isoformat()}
