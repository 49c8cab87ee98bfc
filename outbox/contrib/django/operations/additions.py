"""What apps add to the conditions, the periodic passes and the plans of actions, when Django loads them.

Web processes add too, so this module imports nothing of the code that evaluates conditions and runs passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox.broker.database.executor import Executor
    from outbox.broker.operations.conditions import Condition

Rule = Callable[["Executor"], Sequence["Condition"]]
Work = Callable[[], Mapping[str, Any]]

rules: dict[str, Rule] = {}
# Name -> interval in seconds, and work.
passes: dict[str, tuple[float, Work]] = {}
# Name of a declared action -> the function that plans it.
plans: dict[str, Callable[[Mapping[str, Any]], Any]] = {}


def add_rule(name: str, rule: Rule) -> None:
    """Register a rule that is called each time the conditions are evaluated.

    `name` is the name of the condition that the rule may return. A second rule with the same name replaces the first.
    """
    rules[name] = rule


def add_pass(name: str, interval_seconds: float, work: Work) -> None:
    """Run `work` as a further periodic pass. Other apps call this function in their `AppConfig.ready`.

    If a pass with this name was added before, the new pass replaces it.
    """
    passes[name] = (interval_seconds, work)


def add_plan(action: str, plan: Callable[[Mapping[str, Any]], Any]) -> None:
    """Give a declared action the function that plans it, from a package that the declarations must not import."""
    plans[action] = plan
