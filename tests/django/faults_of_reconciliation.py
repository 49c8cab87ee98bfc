"""The fault of the condition of findings."""

from __future__ import annotations

from tests.django.broker_world import World, fault
from tests.django.repairs import lost, save_finding


@fault("critical")
def reconciliation_findings(world: World) -> None:
    """A reconciliation has found a row without a message, and its result was saved."""
    save_finding(lost("7"))
