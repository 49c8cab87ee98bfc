"""Settling undecided transactions: an operator's decision, or another check by their producer group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from django.http import QueryDict

from outbox.broker.operations.listings import open_transaction
from outbox.broker.operations.trace import trace
from outbox.contrib.django.console.actions.plan import ActionPlan, Option, PageAction
from outbox.contrib.django.console.asking import reading, required, uuid
from outbox.contrib.django.operations import commands as operations
from outbox.errors import UsageError
from outbox.transaction import Decision

_FORCE = Option(
    "force",
    "Without asking the ledger",
    "Only if you know more than the ledger: a wrong commit delivers a message about an event that never happened; a "
    "wrong rollback loses a message.",
)
_EFFECTS = {
    Decision.COMMIT: "Its messages are delivered to every group that subscribes to them.",
    Decision.ROLLBACK: (
        "Its messages are never delivered. First a tombstone is written into the ledger, so that a late commit of "
        "the local transaction fails."
    ),
}


def _decide(given: QueryDict) -> ActionPlan:
    transaction_id = _transaction(given)
    word = required(given, "decision")
    if word not in ("commit", "rollback"):
        raise UsageError(f"{word!r} is not a decision: use commit or rollback.")
    decision = Decision.COMMIT if word == "commit" else Decision.ROLLBACK
    _refuse_running(transaction_id)
    said = operations.ask_ledger(transaction_id)
    force = given.get("force") == "yes"

    def do() -> Mapping[str, Any]:
        status = operations.decide(transaction_id, decision, force=force)
        return {"status": str(status), "without_ledger": force, **_known(transaction_id)}

    return ActionPlan(
        subject=f"transaction {transaction_id}",
        effect=f"{word.capitalize()} transaction {transaction_id}. {_EFFECTS[decision]}",
        caution=f"The first decision is final. The ledger says now: {said}",
        before={"ledger": said, **_known(transaction_id)},
        options=[_FORCE],
        do=do,
    )


def _ask(given: QueryDict) -> ActionPlan:
    transaction_id = _transaction(given)
    known = _known(transaction_id)
    if known.get("decision") is not None:
        raise UsageError(f"{transaction_id} is already decided: no check is needed.")

    def do() -> Mapping[str, Any]:
        operations.ask_again([transaction_id], dry_run=False)
        return _known(transaction_id)

    return ActionPlan(
        subject=f"transaction {transaction_id}",
        effect=f"The check of transaction {transaction_id} is due now: the next check-back pass of its producer group "
        "asks about it. The message's page then shows the answer.",
        before=known,
        do=do,
    )


def _ask_group(given: QueryDict) -> ActionPlan:
    group = required(given, "producer_group")
    count = len(operations.ask_again(group=group, parked=True, dry_run=True))
    return ActionPlan(
        subject=f"producer group {group}",
        effect=f"The checks of {count} parked transactions of producer group {group} are due now.",
        before={"parked": count},
        nothing=count == 0,
        do=lambda: {"due": len(operations.ask_again(group=group, parked=True, dry_run=False))},
    )


def _reject(given: QueryDict) -> ActionPlan:
    return _switch(
        True, "New transactional messages are refused: every transaction that publishes one fails and rolls back."
    )


def _accept(given: QueryDict) -> ActionPlan:
    return _switch(False, "New transactional messages are accepted again.")


def _switch(rejecting: bool, effect: str) -> ActionPlan:
    now, _ = operations.switch_transactional(None, dry_run=True)

    def do() -> Mapping[str, Any]:
        return {"rejecting": operations.switch_transactional(rejecting, dry_run=False)[0]}

    return ActionPlan(subject="the broker", effect=effect, before={"rejecting": now}, do=do, nothing=now is rejecting)


def _transaction(given: QueryDict) -> UUID:
    found = uuid(given, "transaction")
    if found is None:
        raise UsageError("No transaction is given: go back to the page that had the button.")
    return found


def _refuse_running(transaction_id: UUID) -> None:
    with reading() as run:
        found = open_transaction(run, transaction_id)
    if found is not None and found.may_run:
        raise UsageError(
            f"{transaction_id} was not decided: its local transaction may still run, because {found.may_run}. A "
            "wrong decision would contradict it. Choose `Ask again`: check-back asks its ledger as soon as its "
            "immunity has ended, and decides it, or the page offers the decision then."
        )


def _known(transaction_id: UUID) -> Mapping[str, Any]:
    with reading() as run:
        found = trace(run, transaction_id)
    if found is None:
        raise UsageError(f"the broker has no transaction {transaction_id}, or has deleted it.")
    pending = found.pending
    return {
        "decision": found.decision and found.decision.decision,
        "checks": pending and pending.checks,
        "due_at": pending and pending.due_at,
        "parked_at": pending and pending.parked_at,
        "last_answer": pending and pending.last_answer,
    }


ACTIONS = (
    PageAction("decide", "Decide a transaction", _decide),
    PageAction("ask", "Ask about a transaction again", _ask),
    PageAction("ask_group", "Ask about all parked transactions again", _ask_group),
    PageAction("reject", "Refuse transactional messages", _reject),
    PageAction("accept", "Accept transactional messages", _accept),
)
