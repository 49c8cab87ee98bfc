"""The action that deletes a topic, and the list of the declared ones. OUTBOX['TOPICS'] creates and changes topics."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

from outbox.broker.log.topics import list_topics
from outbox.broker.operations.deletion import delete_topic
from outbox.contrib.django.actions.declaration import ActionPlan, Values, action, argument, counted
from outbox.contrib.django.actions.groups import describe_losses
from outbox.contrib.django.actions.listing import Column, Listing
from outbox.contrib.django.database.aliases import on_broker


@action(
    "delete_topic",
    "Delete a topic: refuse new messages, delete its subscriptions and messages",
    "outbox_topic delete",
    argument("name", "topic"),
    permission=None,
)
def _delete(values: Values) -> ActionPlan:
    name = values["name"]
    loss = on_broker(delete_topic, name, dry_run=True)
    return ActionPlan(
        subject=f"topic {name}",
        effect=f"Delete topic {name}, with {counted(loss.undelivered, 'message')} in no queue yet, and "
        f"{describe_losses(loss.groups)}. Remove the topic from OUTBOX['TOPICS'], or `migrate` declares it again.",
        caution="This cannot be undone.",
        dangerous=True,
        before={"losses": asdict(loss)},
        do=lambda: {"lost": asdict(on_broker(delete_topic, name))},
    )


LISTED: Final = Listing(
    "declared_topics",
    (
        Column("topic", "name"),
        Column("types", lambda one: "+".join(sorted(one.types))),
        Column("queues", "queue_count"),
        Column("retention s", "retention_seconds"),
        Column("key lock", "key_lock"),
        Column("on park", "on_park"),
    ),
    lambda run, asked: list_topics(run),
    command="outbox_topic list",
    help="list every topic of the broker",
    json=lambda one: {**asdict(one), "types": sorted(one.types)},
)
