"""Conditions of the application's own tables, which the broker does not know: evaluated after the broker's rules."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from django.db.utils import DatabaseError

from outbox.broker.database.executor import Executor
from outbox.broker.operations.conditions import Condition, ConditionReport, Severity, condition, worst_first

logger = logging.getLogger(__name__)

Rule = Callable[[Executor], Sequence[Condition]]

_rules: dict[str, Rule] = {}


def add_rule(name: str, rule: Rule) -> None:
    """Evaluate `rule` whenever the conditions are evaluated; registering it twice has no further effect.

    `name`: the condition that it may return.
    """
    _rules[name] = rule


def with_application(verdict: ConditionReport, run: Executor) -> ConditionReport:
    """The verdict on the broker, and the conditions of the application's tables."""
    return worst_first([*verdict.conditions, *_all(run)])


def _all(run: Executor) -> Iterator[Condition]:
    for name, rule in _rules.items():
        try:
            yield from rule(run)
        except DatabaseError as error:
            # A condition whose table could not be read is unknown, not false.
            logger.warning("whether %r holds is unknown, its table could not be read: %s", name, error)
            yield from condition(name, [(Severity.WARNING, {"unknown": str(error).strip()})])
