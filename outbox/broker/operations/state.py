"""The state of the broker that the rules of conditions read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.operations.conditions import Severity, Threshold, Thresholds
from outbox.broker.operations.summary import Summary

_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True)
class BrokerState:
    """The broker's tables, the newest summary, and the thresholds that the project has changed."""

    run: Executor
    summary: Summary
    thresholds: Thresholds = field(default_factory=dict)
    _known: dict[Callable[[Executor], Any], Any] = field(default_factory=dict)

    def judge(self, threshold: Threshold, value: float | None) -> Severity | None:
        """Return the severity of a value by the threshold of this project."""
        return threshold.judge(value, self.thresholds)

    def facts(self, statement: Statement, **parameters: Any) -> list[dict[str, Any]]:
        """Return the rows of a statement as facts, which are named like the columns."""
        return self.run.objects(dict, statement, parameters)

    def once(self, read: Callable[[Executor], _Read]) -> _Read:
        """Return what `read` returns. Several rules get the same result, and the function is called once."""
        if read not in self._known:
            self._known[read] = read(self.run)
        found: _Read = self._known[read]
        return found
