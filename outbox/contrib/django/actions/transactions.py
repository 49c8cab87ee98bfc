"""Actions on undecided transactions: decide or check a transaction, and refuse new transactional messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final
from uuid import UUID

from outbox.broker.database.executor import Executor, Row
from outbox.broker.operations import changes
from outbox.broker.operations.conditions import duration
from outbox.broker.operations.listings import list_open, may_run, open_transaction
from outbox.broker.operations.liveness import leadership
from outbox.broker.operations.trace import trace
from outbox.broker.transaction import turns
from outbox.broker.transaction.checks import find_undecided
from outbox.broker.transaction.half_scan import hint_checks, list_waiting
from outbox.contrib.django.actions.cells import ago, badge, error, inert, joined, message_link, quiet, shortened
from outbox.contrib.django.actions.declaration import (
    MOST,
    ActionPlan,
    Button,
    Field,
    FieldKind,
    Values,
    action,
    argument,
    at_most,
    counted,
)
from outbox.contrib.django.actions.listing import Asked, Column, Listing
from outbox.contrib.django.database.aliases import broker_executor, on_broker
from outbox.contrib.django.engine.broker import get_broker
from outbox.contrib.django.ledger.ledger_checker import LedgerChecker
from outbox.contrib.django.settings.conf import get_settings
from outbox.errors import UsageError
from outbox.transaction import Answer, Check, DecidedBy, Decision, EndStatus, EndTransaction

_ID: Final = argument("id", "id of the transaction or a message", FieldKind.ID)

_EFFECTS = {
    Decision.COMMIT: "The messages of the transaction are delivered to every group that subscribes to them.",
    Decision.ROLLBACK: (
        "The messages of the transaction are never delivered. First the action writes a tombstone into the ledger, so "
        "that a late commit of the local transaction fails."
    ),
}
_FORCED = {
    Decision.COMMIT: "The ledger is not asked: a wrong commit delivers a message about a write that never happened.",
    Decision.ROLLBACK: "The ledger is not asked, and gets no tombstone: a wrong rollback loses a message.",
}


def decide(transaction_id: UUID, decision: Decision, *, force: bool = False) -> EndStatus:
    """Apply an operator's decision about an undecided (usually parked) transaction.

    First the checker reads the ledger, for a rollback also by the barrier, so that a late commit fails; not with
    `force`. Raises UsageError if it does not confirm the decision, or if the transaction is not undecided.
    """
    check = _undecided(transaction_id)
    if not force:
        answer = _asked(replace(check, may_write=decision is Decision.ROLLBACK))
        if answer.decision is not decision:
            raise UsageError(_not_proven(check, decision, answer))
    end = EndTransaction(
        transaction_id=check.transaction_id,
        decision=decision,
        producer_group=check.producer_group,
        decided_by=DecidedBy.OPERATOR,
    )
    return get_broker().end([end])[0]


def ask_again(
    ids: Sequence[UUID] = (), *, group: str | None = None, parked: bool = False, limit: int = MOST, dry_run: bool
) -> tuple[list[UUID], str]:
    """Request a check of undecided transactions now. Returns their ids, the oldest first.

    The second value says which producer groups will not answer, because none of their processes runs check-back; it is
    '' if all of them answer.

    `ids` names the transactions; without it, the oldest ones of `group` or of all groups are selected, at most `limit`,
    with `parked` only parked ones. The next check-back pass of a producer group runs the requested checks of the group.
    If one of the named transactions is not undecided, UsageError is raised, and no check is requested.
    """
    settings = get_settings().check
    with broker_executor() as run, run.connection.transaction(force_rollback=dry_run):
        wanted = sorted(set(ids)) or list_waiting(run, group, parked=parked, limit=limit)
        if hint_checks(run, wanted, settings=settings) != len(wanted):
            known = {one: find_undecided(run, one) for one in wanted}
            if strangers := [one for one, check in known.items() if check is None]:
                raise UsageError(
                    f"these transactions are not undecided: {', '.join(map(str, strangers))}. No check was requested. "
                    "`outbox_transaction list` lists undecided transactions, and `outbox_message show ID` shows the "
                    "outcome of a transaction."
                )
            # Some of the ids are those of further messages of their transactions.
            wanted = sorted({check.transaction_id for check in known.values() if check is not None})
            hint_checks(run, wanted, settings=settings)
        silent = turns.silent_groups(run, wanted)
    return wanted, " ".join(_silence(name, seconds) for name, seconds in silent.items())


def _silence(group: str, seconds: float | None) -> str:
    last = "has ever run" if seconds is None else f"has run for {duration(seconds)}"
    return (
        f"No process answers for producer group {group!r}, because no check-back pass of it {last}. Start a worker "
        "with the role check in the service of this group: `celery -A app worker --outbox` or `manage.py "
        "outbox_worker`."
    )


# -- ask ------------------------------------------------------------------------------------------------


def _ask_button(transaction_id: object) -> Sequence[Button]:
    return [Button("Ask again", fields={"ids": transaction_id})]


def _ask_parked(page: Mapping[str, Any]) -> Sequence[Button]:
    fields = {"group": page["asked"]["group"], "parked": "yes"}
    is_possible = fields["group"] and not page["silent"]
    return [Button("Ask about all parked ones of this group", fields=fields)] if is_possible else []


@action(
    "ask",
    "Request checks of undecided transactions",
    "outbox_transaction ask",
    Field("ids", "transaction or message ids", FieldKind.ID, positional=True, many=True),
    Field("group", "only transactions of this producer group"),
    Field("parked", "only parked transactions", FieldKind.FLAG),
    Field("all", "transactions of every group, parked or not", FieldKind.FLAG),
    at_most("transactions"),
    buttons={
        "undecided": lambda one: (
            _ask_button(one.transaction_id) if one.is_answered else [quiet("No process answers its checks.")]
        ),
        "parked transactions": _ask_parked,
        "search": lambda found: (
            _ask_button(found[0].transaction_id) if found[0].state in ("undecided", "parked") else []
        ),
        "undecided message": lambda page: _ask_button(page["message"].transaction_id) if page["is_answered"] else [],
    },
)
def _ask(values: Values) -> ActionPlan:
    ids, group, parked, limit = values["ids"], values["group"], values["parked"], values["limit"]
    if sum((bool(ids), group is not None or parked, values["all"])) != 1:
        raise UsageError("name transaction ids, or select by --group and --parked, or pass --all.")

    def asked(*, dry_run: bool) -> Mapping[str, Any]:
        found, silence = ask_again(ids, group=group, parked=parked, limit=limit, dry_run=dry_run)
        state = {"state": _known(ids[0])} if len(ids) == 1 else {}
        return {
            "transactions": len(found),
            "transaction_ids": found,
            **({"no_answer": silence} if silence else {}),
            **state,
        }

    planned = asked(dry_run=True)
    count = planned["transactions"]
    which = (
        ", ".join(map(str, ids))
        if ids
        else f"{'parked' if parked else 'undecided'} ones" + (f" of producer group {group}" if group else "")
    )
    more = (
        f" One action checks at most {limit:,} transactions: repeat the action for the other transactions."
        if not ids and count == limit
        else ""
    )
    silence = planned.get("no_answer", "")
    then = (
        "They stay undecided until a process of their producer group runs."
        if silence
        else "The next check-back pass of their producer group checks these transactions. After that, the page of the "
        "message shows the answer."
    )
    return ActionPlan(
        subject=f"producer group {group}" if group else f"transactions: {which}",
        effect=f"The checks of {counted(count, 'transaction')} ({which}) are due now. {then}{more}",
        caution=silence,
        before={name: value for name, value in planned.items() if name != "no_answer"},
        nothing=count == 0,
        do=lambda: asked(dry_run=False),
    )


# -- decide --------------------------------------------------------------------------------------


def _decide_buttons(transaction_id: object) -> Sequence[Button]:
    return [
        Button("Commit …", "good", {"id": transaction_id, "decision": "commit"}),
        Button("Roll back …", "bad", {"id": transaction_id, "decision": "rollback"}),
    ]


@action(
    "decide",
    "Decide a transaction",
    "outbox_transaction decide",
    _ID,
    argument("decision", "the ledger must agree, or you must give --force", choices=("commit", "rollback")),
    Field(
        "force",
        "Only if you know more than the ledger: a wrong commit delivers a message about an event that never happened; "
        "a wrong rollback loses a message.",
        FieldKind.FLAG,
        label="Decide without asking the ledger",
        with_confirmation=True,
    ),
    Field(
        "running",
        "together with --force: decide even if the local transaction may still run",
        FieldKind.FLAG,
        on_page=False,
    ),
    buttons={
        "undecided": lambda one: (
            [quiet(f"It may still run: {why}.")] if (why := may_run(one)) else _decide_buttons(one.transaction_id)
        ),
        "undecided message": lambda page: [] if page["may_run"] else _decide_buttons(page["message"].transaction_id),
    },
)
def _decide(values: Values) -> ActionPlan:
    decision, force = Decision[values["decision"].upper()], values["force"]
    check = _undecided(values["id"])
    transaction_id = check.transaction_id
    if force and not values["running"]:
        _refuse_running(transaction_id)
    answer = _asked(replace(check, may_write=False))
    said = (f"{answer.decision.name}: {answer.detail}" if answer.detail else answer.decision.name).rstrip(".")
    # The barrier of a rollback writes a tombstone, and a plan must not write.
    barrier = decision is Decision.ROLLBACK and answer.decision is Decision.UNKNOWN and not answer.alarm
    refusal = "" if force or barrier or answer.decision is decision else _not_proven(check, decision, answer)

    def do() -> Mapping[str, Any]:
        status = decide(transaction_id, decision, force=force)
        return {"status": str(status), "without_ledger": force, **_known(transaction_id)}

    return ActionPlan(
        subject=f"transaction {transaction_id}",
        effect=f"{decision.name.capitalize()} transaction {transaction_id}. "
        f"{_FORCED[decision] if force else _EFFECTS[decision]}",
        caution="The first decision is final."
        + (f" The ledger says now: {said}." if not refusal else "")
        + (
            " While the action runs, the barrier of the ledger decides whether the rollback is possible."
            if barrier and not force
            else ""
        ),
        dangerous=force,
        before={"ledger": said, **_known(transaction_id)},
        refusal=refusal,
        do=do,
    )


def _undecided(transaction_id: UUID) -> Check:
    check = on_broker(find_undecided, transaction_id)
    if check is None:
        raise UsageError(
            f"{transaction_id} is not an undecided transaction: `outbox_message show {transaction_id}` shows its "
            "outcome."
        )
    return check


def _asked(check: Check) -> Answer:
    return next(iter(LedgerChecker().check_local_transactions([check])))


def _not_proven(check: Check, decision: Decision, answer: Answer) -> str:
    return (
        f"{decision.name} of {check.transaction_id} is not what the ledger proves: {answer.detail.rstrip('.')}. If you "
        "know more than the ledger, decide without asking it (in a shell: `outbox_transaction decide --force`). A "
        "wrong COMMIT delivers a message about an event that never happened; a wrong ROLLBACK loses a message."
    )


def _refuse_running(transaction_id: UUID) -> None:
    found = on_broker(open_transaction, transaction_id)
    if found is not None and (why := may_run(found)):
        raise UsageError(
            f"{transaction_id} was not decided: its local transaction may still run, because {why}. A "
            "wrong decision would contradict the local transaction. Request a check (`outbox_transaction ask`): after "
            "the immunity has ended, check-back asks the ledger and decides, and an operator may also decide. "
            "`outbox_transaction decide --force --running` decides at once."
        )


def _known(transaction_id: UUID) -> Mapping[str, Any]:
    found = on_broker(trace, transaction_id)
    if found is None:
        raise UsageError(f"the broker does not have transaction {transaction_id}: retention may have deleted it.")
    pending = found.pending
    names = ("checks", "due_at", "parked_at", "last_answer")
    return {
        "decision": found.decision and found.decision.decision,
        **{name: pending and getattr(pending, name) for name in names},
    }


# -- reject, accept -------------------------------------------------------------------------------------


@action(
    "reject",
    "Refuse new transactional messages",
    "outbox_transaction reject",
    buttons={"overview": lambda page: [] if page["is_rejecting"] else [Button("Refuse them …", "bad")]},
)
def _reject(values: Values) -> ActionPlan:
    return _switch(
        True, "New transactional messages are refused: every transaction that publishes such a message fails."
    )


@action(
    "accept",
    "Accept transactional messages again",
    "outbox_transaction accept",
    buttons={"overview": lambda page: [Button("Accept them again")] if page["is_rejecting"] else []},
)
def _accept(values: Values) -> ActionPlan:
    return _switch(False, "New transactional messages are accepted again.")


def _switch(rejecting: bool, effect: str) -> ActionPlan:
    now = on_broker(leadership).is_rejecting

    def do() -> Mapping[str, Any]:
        on_broker(changes.reject_transactional, rejecting)
        return {"rejecting": rejecting}

    return ActionPlan(subject="the broker", effect=effect, before={"rejecting": now}, do=do, nothing=now is rejecting)


# -- forget -----------------------------------------------------------------------------------------------


@action(
    "forget_producer_group",
    "Forget a producer group that no service has any more",
    "outbox_transaction forget",
    argument("group", "the PRODUCER_GROUP of a service that was renamed or switched off for good"),
    permission=None,
)
def _forget(values: Values) -> ActionPlan:
    group = values["group"]
    if reason := on_broker(turns.why_in_use, group):
        raise UsageError(f"producer group {group!r} was not forgotten: {reason}.")
    return ActionPlan(
        subject=f"producer group {group}",
        effect=f"Forget the passes of producer group {group}. After that, no condition waits for them. If a process of "
        "the group runs, its next pass makes the group known again.",
        do=lambda: {"forgotten": on_broker(turns.retire, group)},
    )


# -- the list -------------------------------------------------------------------------------------------


def _read(run: Executor, asked: Asked) -> list[Row]:
    """Return a page of open transactions. `is_answered`: a process answers the checks of the producer group."""
    found = list_open(run, **asked.only("group", "parked", "after"), limit=asked.limit)
    silent = turns.silent_groups(run, [one.transaction_id for one in found])
    for one in found:
        one.is_answered = one.producer_group not in silent
    return found


def _notes(run: Executor, asked: Asked, rows: Sequence[Row]) -> Mapping[str, object]:
    return {"silent": sorted({one.producer_group for one in rows if not one.is_answered})}


def _producer(one: Row) -> list[object]:
    if one.transactional_id is None:
        return [one.producer_group]
    named = quiet(f"{one.transactional_id}, epoch {one.epoch}")
    return [one.producer_group, named, *([badge("fenced", "")] if one.fenced else [])]


def _last_answer(one: Row) -> list[object]:
    said: object = "not asked yet" if one.state == "new" else error(one.last_answer or "none yet", 120)
    return [badge("parked", "bad"), said] if one.state == "parked" else [said]


OPEN: Final = Listing(
    "undecided",
    (
        Column("Stored", lambda one: ago(one.stored_at)),
        Column("Producer group", _producer),
        Column("Messages", lambda one: [one.messages, "to", joined(one.topics)]),
        Column("Key", lambda one: shortened(inert(one.key), 60), "key"),
        Column("Checks", "checks", "number"),
        Column("Last answer", _last_answer),
        Column("Transaction", lambda one: message_link(one.transaction_id)),
    ),
    _read,
    command="outbox_transaction list",
    help="list open transactions, oldest first, including new transactions that are not checked yet",
    fields=(
        Field("group", "list only transactions of this producer group", label="Producer group"),
        Field("parked", "list only parked transactions", FieldKind.FLAG, by_tab=True),
    ),
    after=Field("after", "list the transactions after this transaction", FieldKind.ID),
    position=lambda one: one.transaction_id,
    address="undecided/",
    title=lambda given: "Parked transactions" if given["parked"] else "Undecided transactions",
    tab=lambda given: "parked" if given["parked"] else "undecided",
    caption="Undecided transactions, the oldest first",
    empty="None. A transaction decided in time never appears here.",
    notes=_notes,
    template="undecided",
)
