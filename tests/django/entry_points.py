"""Every public entry point of outbox.contrib.django that uses the broker: functions, commands, actions."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from typing import Final
from uuid import UUID

from asgiref.sync import async_to_sync
from django.core.management import CommandError, call_command
from django.db import transaction

from outbox.contrib.django import (
    apublish,
    apublish_many,
    apublish_messages,
    fenced_producer,
    message,
    publish,
    publish_many,
    publish_messages,
    recall,
    recall_key,
    run_check_back,
    run_prune,
    transactional_message,
)
from outbox.contrib.django.actions.declaration import DeclaredAction
from outbox.contrib.django.actions.listing import Listing
from outbox.contrib.django.catalogue import ACTIONS, LISTINGS
from outbox.contrib.django.worker.workers import consumer_runtime
from outbox.errors import OutboxError
from tests.django.operators import command_of
from tests.part_apps import has

SOME: Final = UUID("019aa000-0000-7000-8000-000000000000")


@transactional_message("orders", body={})
def decorated() -> None: ...


def in_a_block() -> None:
    with transaction.atomic():
        publish("orders", {})


FUNCTIONS: Final[dict[str, Callable[[], object]]] = {
    "apublish": lambda: async_to_sync(apublish)("orders", {}, at_once=True),
    "apublish_many": lambda: async_to_sync(apublish_many)("orders", [{}], at_once=True),
    "apublish_messages": lambda: async_to_sync(apublish_messages)([message("orders", {})], at_once=True),
    "fenced_producer": lambda: fenced_producer("import", wait_seconds=1),
    "publish": lambda: publish("orders", {}, at_once=True),
    "publish_many": lambda: publish_many("orders", [{}], at_once=True),
    "publish_messages": lambda: publish_messages([message("orders", {})], at_once=True),
    "recall": lambda: recall(SOME),
    "recall_key": lambda: recall_key("orders", "k"),
    "run_check_back": lambda: run_check_back(),
    "run_prune": run_prune,
    "transactional_message": decorated,
}
# `message` and `subscriber` only declare, and `ClaimedDelivery` is a type. `get_broker` connects when it
# is used; `publish` uses it.
OTHERS: Final = {"ClaimedDelivery", "get_broker", "message", "subscriber"}
MORE: Final[dict[str, Callable[[], object]]] = {
    "publish in a block": in_a_block,
    "a consumer": lambda: consumer_runtime().run_once(),
}
# Calls that only read, and calls that find by reading that there is nothing to change.
READING: Final = (
    "outbox_audit settle --no-input",
    f"outbox_transaction decide {SOME} rollback --force",
    "outbox_doctor",
    *(["outbox_group limits effects orders --from-code --no-input"] if has("limits") else []),
    "outbox_message list --key k",
    f"outbox_message show {SOME}",
    "outbox_status",
    "outbox_transaction accept",
    "check --database=broker",
)
CHANGING: Final = (
    "outbox_audit",
    "outbox_audit compare",
    "outbox_dead_letter replay effects --all",
    "outbox_dead_letter discard effects --all --no-input",
    *(["outbox_dead_letter edit effects --all --body {} --no-input"] if has("editing") else []),
    *(["outbox_erase orders --key k --reason asked --no-input"] if has("erasure") else []),
    "outbox_group reset effects orders --to-latest --no-input",
    "outbox_group delete effects --no-input",
    f"outbox_message recall {SOME}",
    "outbox_message recall --topic orders --key k",
    f"outbox_message redeliver {SOME} --group effects --no-input",
    "outbox_topic delete orders --no-input",
    "outbox_transaction ask --all",
    f"outbox_transaction ask {SOME}",
    "outbox_transaction reject",
    "outbox_worker --drain",
)
# Of processes, of results of a run of Spark, of a plan's file, of other brokers; what mends the tables; what asks the
# application's database, the database of keys, or no database.
OTHER_COMMANDS: Final = {
    *(
        "outbox_contract",
        "outbox_finding",
        "outbox_relay",
        "outbox_reconcile",
        "outbox_repair",
        "outbox_install",
        "outbox_receiver",
    ),
    "outbox_subject_key",
}
_DECLARED: Final[list[Listing | DeclaredAction]] = [*LISTINGS.values(), *ACTIONS.values()]
# The declared listings and actions without a line above, with a value for each field that they need.
DECLARED: Final = [
    " ".join(command_of(one, "effects"))
    for one in _DECLARED
    if one.command
    and one.command.split()[0] not in OTHER_COMMANDS
    and not any(line.startswith(one.command) for line in (*READING, *CHANGING))
]
ENTRY_POINTS: Final = [*FUNCTIONS, *MORE, *READING, *CHANGING, *DECLARED]
# One of each way to the broker.
OF_EACH_KIND: Final = (
    *("publish", "publish in a block", "transactional_message", "recall", "run_check_back", "run_prune", "a consumer"),
    *("outbox_status", "outbox_doctor", "outbox_message list --key k", "outbox_audit", "outbox_worker --drain"),
    *("outbox_transaction reject", "check --database=broker"),
)


def say(entry_point: str) -> tuple[bool, str]:
    """Whether it worked, and its text. Other errors than those of outbox and of commands are raised."""
    try:
        if entry_point in FUNCTIONS:
            return True, repr(FUNCTIONS[entry_point]())
        if entry_point in MORE:
            return True, repr(MORE[entry_point]())
    except OutboxError as error:
        return False, str(error)
    out, err = StringIO(), StringIO()
    try:
        call_command(*entry_point.split(), stdout=out, stderr=err)
    except CommandError as error:
        return False, str(error)
    except SystemExit as error:
        return not error.code, out.getvalue() + err.getvalue()
    return True, out.getvalue() + err.getvalue()
