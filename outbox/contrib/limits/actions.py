"""The action on the limits of a consumer group: change them, or return to the limits of the code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outbox.broker.database.executor import Executor
from outbox.contrib.django.actions.cells import badge, span
from outbox.contrib.django.actions.declaration import ActionPlan, Field, FieldKind, GroupSection, Values, action
from outbox.contrib.django.actions.groups import GROUP, TOPIC
from outbox.contrib.django.database.aliases import broker_executor
from outbox.contrib.limits.declaration import Limits
from outbox.contrib.limits.operations import SubscriptionLimits, change_limits, limits_now, list_limits, planned
from outbox.errors import UsageError


def _section(run: Executor, group: str, topic: str) -> tuple[object, Mapping[str, str]] | None:
    now = next((one for one in list_limits(run, group) if one.topic == topic), None)
    if now is None:
        return None
    told: list[object] = [f"Limited to {now.limits}."]
    if now.override:
        told += [badge("changed", "warn"), "An operator has changed the limits of the code."]
    told.append(f"Handler calls that run now: {now.in_use:,}.")
    if now.waiting_for:
        told.append(f"Messages that wait for {now.waiting_for}: {now.waiting:,}, since {span(now.waiting_seconds)}.")
    return [*told, "An empty field leaves its limit as it is."], present_limits(now)


@action(
    "limits",
    "Change the limits of a group on a topic, or return to the limits of the code",
    "outbox_group limits",
    GROUP,
    TOPIC,
    Field(
        "running",
        "at most this number of handler calls run at the same time",
        FieldKind.COUNT,
        example="10",
        label="Handler calls at the same time",
    ),
    Field(
        "per_key",
        "at most this number of handler calls of one key run at the same time",
        FieldKind.COUNT,
        example="1",
        label="Handler calls of one key",
    ),
    Field("rate", 'messages per time, such as "100/min"', label="Messages per time", example="100/min"),
    Field(
        "burst",
        "this number of messages may start at once after a time without messages",
        FieldKind.COUNT,
        label="Messages at once",
        example="5",
    ),
    Field(
        "from_code",
        "remove all changes, so that the limits of the code hold again",
        FieldKind.FLAG,
        label="Return to the limits of the code",
    ),
    section=GroupSection("Limits", "Change limits …", _section),
)
def _change_limits(values: Values) -> ActionPlan:
    group, topic = values["group"], values["topic"]
    fields = {name: values[name] for name in ("running", "per_key", "rate", "burst") if values[name] is not None}
    if bool(fields) == values["from_code"]:
        raise UsageError("Give a limit to change, or return to the limits of the code (--from-code).")
    with broker_executor() as run:
        now = limits_now(run, group, topic)
    override = None if values["from_code"] else {**(now.override or {}), **fields}
    limits = planned(now, fields) if override is not None else planned(replace(now, override=None), {})

    def do() -> Mapping[str, Any]:
        with broker_executor() as run:
            change_limits(run, group, topic, override)
            return _limits(limits_now(run, group, topic))

    return ActionPlan(
        subject=f"group {group} on topic {topic}",
        effect=f"Limit group {group} on topic {topic} to {limits}. Workers obey within a second. Running handlers "
        "finish.",
        before=_limits(now),
        nothing=override == now.override,
        do=do,
    )


def present_limits(now: SubscriptionLimits) -> Mapping[str, str]:
    """The limits that hold now as text, by the names of the fields; a limit that does not exist is named too."""
    stored = now.limits.stored()
    return {name: str(stored.get(name, "no limit")) for name in ("running", "per_key", "rate")} | {
        "burst": str(now.limits.burst)
    }


def _limits(now: SubscriptionLimits) -> Mapping[str, Any]:
    return {"limits": str(now.limits), "code": str(Limits(**now.declared)), "changed": dict(now.override or {})}
