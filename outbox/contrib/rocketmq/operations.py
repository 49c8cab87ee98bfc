"""What an operator sees of RocketMQ: conditions, figures, dead letters, open transactions.

The figures come from the administration ports of the brokers (`outbox.rocketmq.inspection`). The errors of dead letters
and the outcomes of transactions come from the application's database.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, cast
from uuid import UUID

from django.db.utils import DatabaseError

from outbox.broker.operations.broker_conditions import CONDITIONS as CORE
from outbox.broker.operations.broker_conditions import (
    DEAD_LETTERS,
    LAG_MESSAGES,
    LAG_SECONDS,
    UNANSWERED_SECONDS,
    worse,
)
from outbox.broker.operations.conditions import (
    NO_LIST,
    Concern,
    Condition,
    ConditionReport,
    Declarations,
    DeclaredCondition,
    Fact,
    Judged,
    Severity,
    Symptom,
    Threshold,
    Thresholds,
    of_text,
    worst_first,
)
from outbox.broker.operations.dead_letters import DeadLetter, LetterSelection, PagePosition
from outbox.contrib.django.engine.broker import engine_of, get_engine
from outbox.contrib.django.ledger import ledger
from outbox.contrib.django.ledger.ledger_checker import ledger_aliases, open_connection
from outbox.contrib.django.settings.conf import OutboxSettings, get_settings
from outbox.contrib.django.subscribers.registry import autodiscover, subscribers
from outbox.contrib.rocketmq import dead_letter_notes, relay_rows
from outbox.contrib.rocketmq.engine import RocketMQEngine
from outbox.contrib.rocketmq.operator_table import refused_command as refused_command
from outbox.contrib.rocketmq.operator_table import refused_page as refused_page
from outbox.contrib.rocketmq.relay_rows import RelayBacklog
from outbox.errors import BrokerError, UnknownGroup, UsageError
from outbox.rocketmq import inspection
from outbox.rocketmq.admin import Admin, brokers_of
from outbox.rocketmq.inspection import GroupFigures, Letter, OpenHalf, TopicFigures

logger = logging.getLogger(__name__)

REPLAY_CAUTION: Final = (
    "On RocketMQ, every group of the topic gets the messages again; the inboxes skip what they have handled."
)
OVERVIEW_PAGE: Final = "rocketmq"

# RocketMQ's proxy caches the topics. So for about 20 s, the proxy may report that a new topic is missing, or may report
# the former type of a changed topic.
_SETTLE_SECONDS: Final = 30.0
_PAUSE_SECONDS: Final = 0.5
_CLOCK_DIFFERENCE: Final = timedelta(seconds=5)
# An operator waits for the answer, and a page has a deadline of 5 s.
_ANSWER_SECONDS: Final = 2.0
_PUBLISH_SECONDS: Final = 10.0
_OUTCOMES: Final = {"C": "committed", "R": "rolled back"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFigures:
    """The figures of a RocketMQ cluster. `dead`: dead letters by group that no operator has settled.

    `relay`: the messages of each application database that wait for the relay.
    """

    producer_group: str
    topics: Sequence[TopicFigures]
    groups: Sequence[GroupFigures]
    dead: Mapping[str, int]
    halves: Sequence[OpenHalf]
    relay: Sequence[RelayBacklog]

    @property
    def unsettled(self) -> list[tuple[str, int]]:
        """The groups with dead letters that no operator has settled, and their numbers."""
        return [(group, count) for group, count in self.dead.items() if count]

    def headline(self) -> str:
        """The producer group with its undecided half messages."""
        given_up = sum(one.is_given_up for one in self.halves)
        return (
            f"RocketMQ, producer group {self.producer_group or 'none'}: {len(self.halves) - given_up} undecided, "
            f"{given_up} given up"
        )

    def tables(self) -> Iterator[tuple[Sequence[str], Iterable[Sequence[object]]]]:
        """The topics and the groups: headings and rows."""
        yield (
            ["topic", "queues", "written", "stored"],
            [(one.topic, one.queues or "missing", one.written, one.stored) for one in self.topics],
        )
        yield (
            ["group", "topic", "lag", "retrying", "oldest waits since", "dead"],
            [
                (one.group, one.topic, *((one.lag, one.retrying) if one.is_known else ("missing", "")), one.oldest_at,
                 self.dead[one.group])
                for one in self.groups
            ],
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "topics": [dataclasses.asdict(one) for one in self.topics],
            "groups": [dataclasses.asdict(one) for one in self.groups],
            "dead_letters": dict(self.dead),
            "undecided": sum(not one.is_given_up for one in self.halves),
            "given_up": sum(one.is_given_up for one in self.halves),
            "relay": [dataclasses.asdict(one) for one in self.relay],
        }


def brokers() -> list[Admin]:
    """The administration ports of the cluster. Raises UsageError if the settings name none."""
    found = brokers_of(get_settings().broker, timeout_seconds=_ANSWER_SECONDS)
    if not found:
        raise UsageError(
            "OUTBOX['BROKER'] names no administration port of a RocketMQ broker, and RocketMQ's proxy shows nothing "
            "about stored messages. Append the listenPort of every broker: ?brokers=BROKER:10911,BROKER:10911."
        )
    return found


def pairs() -> list[tuple[str, str]]:
    """The subscriptions (group, topic) of this project."""
    autodiscover()
    return [(item.subscription.group, item.subscription.topic) for item in subscribers()]


# -- status ---------------------------------------------------------------------------------------------


def look() -> tuple[ConditionReport, ServerFigures | None]:
    """The conditions that hold, and the figures; the figures are None if a broker does not answer.

    Raises ConfigurationError.
    """
    settings = get_settings()
    try:
        figures = _figures(settings, brokers())
    except (BrokerError, UsageError) as error:
        return _unreachable(error), None
    return worst_first(CONDITIONS.evaluate(_State(figures, settings))), figures


def examine() -> Iterator[Condition]:
    """The conditions that hold, and the problems of the topics, for the doctor. Raises ConfigurationError."""
    verdict, _ = look()
    yield from verdict.conditions
    if not verdict.conditions:
        yield of_text("RocketMQ", Severity.OK, "every broker answers, and nothing needs attention")
    engine = engine_of(get_settings())
    try:
        for problem in engine.server_problems():
            yield of_text("RocketMQ's topics", Severity.CRITICAL, problem, "Run `manage.py outbox_install --create`.")
    finally:
        engine.broker.close()


def probe() -> ConditionReport:
    """Whether every broker and the proxy answer. Raises ConfigurationError."""
    settings = get_settings()
    try:
        for broker in brokers():
            inspection.reachable(broker)
        for problem in cast(RocketMQEngine, engine_of(settings)).broker.topic_problems():
            raise BrokerError(problem)
    except (BrokerError, UsageError) as error:
        return _unreachable(error)
    return worst_first([])


def _unreachable(error: Exception) -> ConditionReport:
    found = CONDITIONS["unreachable"].condition(Severity.CRITICAL, [{"error": str(error).strip()}], 1)
    return worst_first([found], is_complete=False)


def _figures(settings: OutboxSettings, admins: Sequence[Admin]) -> ServerFigures:
    subscriptions = pairs()
    groups = sorted({group for group, _ in subscriptions})
    topics = sorted({*settings.topics, *(topic for _, topic in subscriptions)})
    producer_group = settings.producer_group or ""
    return ServerFigures(
        producer_group=producer_group,
        topics=inspection.topic_figures(admins, topics),
        groups=inspection.group_figures(admins, subscriptions),
        dead={group: _unsettled(admins, group) for group in groups},
        halves=inspection.open_halves(admins, producer_group) if producer_group else [],
        relay=list(_backlogs()),
    )


def _backlogs() -> Iterator[RelayBacklog]:
    for alias in ledger_aliases(usable=True):
        try:
            yield relay_rows.backlog(alias)
        except DatabaseError as error:
            # The alias may belong to another broker, without the table.
            logger.info("the relay's rows of alias %r cannot be read: %s", alias, str(error).strip())


def _unsettled(admins: Sequence[Admin], group: str) -> int:
    count = inspection.count_dead_letters(admins, group)
    if not count:
        return 0
    notes = dead_letter_notes.notes_of(group)
    if not any(one.settled_until for one in notes.values()):
        return count
    return sum(not _is_settled(one, notes) for one in inspection.dead_letters(admins, group))


@dataclass(frozen=True, slots=True)
class _State:
    """What the rules read."""

    figures: ServerFigures
    settings: OutboxSettings
    now: datetime = field(default_factory=lambda: datetime.now(UTC))

    def judge(self, threshold: Threshold, value: float | None) -> Severity | None:
        thresholds: Thresholds = self.settings.thresholds
        return threshold.judge(value, thresholds)


CONDITIONS: Final = Declarations[_State]()
CONDITIONS.add(
    DeclaredCondition(
        name="unreachable",
        meaning="A part of the RocketMQ cluster does not answer. Publishing or delivery may fail.",
        next_step="Check that all brokers and proxies in OUTBOX['BROKER'] run, and that this host reaches their ports.",
        concern=Concern.PUBLISHING,
        symptom=Symptom.PUBLISHING,
        shown=NO_LIST,
    )
)


@CONDITIONS.declare(
    meaning=CORE["lag"].meaning,
    next_step="Add consumers, or correct the slow handler. `mqadmin consumerProgress` shows which queues are behind.",
    concern=Concern.WAITING,
    symptom=Symptom.WAITING,
    thresholds=(LAG_SECONDS, LAG_MESSAGES),
    shown=NO_LIST,
)
def lag(state: _State) -> Iterator[Judged]:
    for one in state.figures.groups:
        if not one.is_known:
            missing = "does not exist on RocketMQ: run outbox_install --create"
            yield Severity.CRITICAL, {"group": one.group, "topic": one.topic, "problem": missing}
            continue
        age = None if one.oldest_at is None else (state.now - one.oldest_at).total_seconds()
        severity = worse(state.judge(LAG_SECONDS, age), state.judge(LAG_MESSAGES, one.lag))
        yield severity, {"group": one.group, "topic": one.topic, "messages": one.lag, "oldest_seconds": age}


@CONDITIONS.declare(
    meaning="These groups have dead letters that no operator has replayed or discarded.",
    next_step="`outbox_dead_letter list GROUP` shows the errors. Fix the handler, then replay the dead letters.",
    concern=Concern.HANDLERS,
    symptom=Symptom.HANDLERS,
    thresholds=(DEAD_LETTERS,),
    shown=NO_LIST,
)
def dead_letters(state: _State) -> Iterator[Judged]:
    for group, dead in state.figures.dead.items():
        if dead:
            yield state.judge(DEAD_LETTERS, dead), {"group": group, "unsettled": dead}


@CONDITIONS.declare(
    meaning="Half messages are undecided on RocketMQ, and no process of their producer group answers its checks.",
    next_step="Start a worker of this service. `outbox_transaction list` shows the outcomes in the ledger.",
    concern=Concern.UNDECIDED,
    symptom=Symptom.UNDECIDED,
    thresholds=(UNANSWERED_SECONDS,),
    shown=NO_LIST,
)
def unanswered(state: _State) -> Iterator[Judged]:
    for one in state.figures.halves:
        if not one.is_given_up:
            age = (state.now - one.sent_at).total_seconds() - state.settings.check.immunity_seconds
            yield state.judge(UNANSWERED_SECONDS, age), _about(one)


@CONDITIONS.declare(
    meaning="RocketMQ has given up half messages. It deletes them after fileReservedTime (72 h).",
    next_step="Start a worker of this service. The pass `exhausted_checks` of its role check asks the ledger about "
    "them.",
    concern=Concern.UNDECIDED,
    symptom=Symptom.UNDECIDED,
    shown=NO_LIST,
)
def parked(state: _State) -> Iterator[Judged]:
    for one in state.figures.halves:
        if one.is_given_up:
            yield Severity.CRITICAL, _about(one)


@CONDITIONS.declare(
    meaning="Messages wait in the table outbox_relay, and the relay does not send them to RocketMQ.",
    next_step="Start a worker with the role relay. `outbox_relay list` shows the errors of its sends.",
    concern=Concern.WAITING,
    symptom=Symptom.WAITING,
    thresholds=(LAG_SECONDS,),
    shown=NO_LIST,
)
def relay_behind(state: _State) -> Iterator[Judged]:
    for one in state.figures.relay:
        if one.waiting:
            age = _age(one.oldest_at, state.now)
            fact: Fact = {"database": one.alias, "messages": one.waiting, "oldest_seconds": age}
            yield state.judge(LAG_SECONDS, age), fact


@CONDITIONS.declare(
    meaning="RocketMQ has rejected messages of the relay. The later messages of their keys wait.",
    next_step="`outbox_relay list` shows the errors. Correct the cause, then `outbox_relay retry ID`, or "
    "`outbox_relay discard ID`.",
    concern=Concern.WAITING,
    symptom=Symptom.WAITING,
    shown=NO_LIST,
)
def relay_parked(state: _State) -> Iterator[Judged]:
    for one in state.figures.relay:
        if one.parked:
            yield Severity.CRITICAL, {"database": one.alias, "messages": one.parked}


def _about(half: OpenHalf) -> Fact:
    sent = half.sent_at.isoformat(timespec="seconds")
    return {"transaction": str(half.transaction_id), "topic": half.message.topic, "sent_at": sent}


# -- installation ---------------------------------------------------------------------------------------


def install(create: str | None, *, say: Callable[[str], None]) -> None:
    """Compare RocketMQ's topics with the declared topics.

    If `create` is an address, first create the topics and groups at this address; if it is empty, at each broker.

    Raises UsageError if a topic or group is missing, or if RocketMQ has stopped checking transactions that no worker
    has decided yet.
    """
    settings = get_settings()
    engine = cast(RocketMQEngine, get_engine())
    engine.require()
    if create is not None:
        topics, subscriptions = engine.create(create)
        say(f"created or updated: {topics} topics, {subscriptions} subscriptions")
    if problems := _problems(engine.server_problems, 0.0 if create is None else _SETTLE_SECONDS):
        raise UsageError("\n".join(problems))
    say(f"RocketMQ has the declared topics: {', '.join(sorted(settings.topics)) or 'none'}")
    if given_up := engine.given_up():
        raise UsageError(
            f"RocketMQ has stopped checking {given_up} half messages of producer group {settings.producer_group!r}, "
            "and no worker has decided them yet: start outbox_worker. If a worker runs, its log names the transactions "
            "and the reason."
        )


def _problems(look: Callable[[], Iterable[str]], seconds: float) -> list[str]:
    """Call `look` until it finds no problem, for at most `seconds`. Return the problems of the last call."""
    deadline = time.monotonic() + seconds
    while (problems := list(look())) and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)
    return problems


# -- dead letters ---------------------------------------------------------------------------------------


def list_letters(
    group: str | None,
    selection: LetterSelection,
    *,
    settled: bool = False,
    after: PagePosition | None = None,
    limit: int | None = None,
) -> list[DeadLetter]:
    """The dead letters of one group or of all groups of the project, newest first. Raises BrokerError.

    Raises UnknownGroup for a group without a subscriber in this project.
    """
    admins = brokers()
    found = [shown for one in _groups(group) for _, shown in _letters(admins, one, selection, settled=settled)]
    found.sort(key=lambda one: one.place, reverse=True)
    following = [one for one in found if after is None or one.place < after]
    return following[:limit]


def _groups(group: str | None) -> list[str]:
    known = sorted({name for name, _ in pairs()})
    if group is None:
        return known
    if group not in known:
        raise UnknownGroup(
            f"no subscriber of this project has the group {group!r}; it has {', '.join(known) or 'none'}."
        )
    return [group]


def _letters(
    admins: Sequence[Admin], group: str, selection: LetterSelection, *, settled: bool
) -> Iterator[tuple[Letter, DeadLetter]]:
    notes = dead_letter_notes.notes_of(group)
    for letter in inspection.dead_letters(admins, group):
        is_settled = _is_settled(letter, notes)
        noted = notes.get(letter.message.message_id)
        shown = DeadLetter(
            group=group,
            message_id=letter.message.message_id,
            topic=letter.message.topic,
            key=letter.message.key,
            tag=letter.message.tag,
            attempts=noted.attempts if noted else 0,
            error=noted.error if noted else letter.problem,
            dead_at=letter.dead_at,
            replayed_at=noted.settled_at if noted and is_settled else None,
            discarded_at=noted.settled_at if noted and is_settled and noted.is_discarded else None,
            log_id=letter.stored_milliseconds,
        )
        if (settled or not is_settled) and _matches(selection, shown):
            yield letter, shown


def _is_settled(letter: Letter, notes: Mapping[UUID, Any]) -> bool:
    noted = notes.get(letter.message.message_id)
    return noted is not None and letter.stored_milliseconds <= noted.settled_until


def _matches(selection: LetterSelection, letter: DeadLetter) -> bool:
    error_type = letter.error.partition(":")[0].rpartition(".")[2]
    return (
        (selection.message_ids is None or letter.message_id in selection.message_ids)
        and (selection.topic is None or letter.topic == selection.topic)
        and (selection.key is None or letter.key == selection.key)
        and (selection.error is None or selection.error.lower() in letter.error.lower())
        and (selection.error_type is None or error_type == selection.error_type)
        and (selection.since is None or letter.dead_at >= selection.since)
        and (selection.until is None or letter.dead_at < selection.until)
    )


def now() -> datetime:
    """RocketMQ does not report its time, and its clock may be ahead of the clock of this host."""
    return datetime.now(UTC) + _CLOCK_DIFFERENCE


def settle_letters(group: str, selection: LetterSelection, *, limit: int, replay: bool, dry_run: bool) -> int:
    """Replay or discard dead letters, the oldest first, and return their number.

    A replayed message is published again under its id. If the process dies between the publication and the note, the
    message may be replayed twice; the inbox then skips the second copy. Raises BrokerError or UnknownGroup. Raises
    UsageError if one of the ids is not a dead letter of the group.
    """
    admins = brokers()
    _groups(group)
    found = sorted(_letters(admins, group, selection, settled=False), key=lambda one: one[1].place)
    ids = selection.message_ids
    for letter, _ in found if replay and ids is not None else ():
        if letter.problem:
            raise UsageError(
                f"dead letter {letter.message.message_id} of group {group!r} cannot be replayed, because it cannot be "
                f"read: {letter.problem}. Nothing was changed. Publish its message anew from your own data, and run "
                f"`outbox_dead_letter discard {group} {letter.message.message_id}`."
            )
    # An unreadable letter can only be discarded.
    found = [one for one in found if not (replay and one[0].problem)]
    # A message may have several dead letters; all of them are about the same message.
    newest = {letter.message.message_id: letter for letter, _ in found[:limit]}
    if ids is not None and len(newest) != len(set(ids)):
        raise UsageError(
            f"{len(newest)} of the {len(set(ids))} ids are dead letters of group {group!r} that match the other "
            f"options (or --limit is too low), so nothing was changed. `outbox_dead_letter list {group}` lists the "
            "dead letters."
        )
    if dry_run:
        return len(newest)
    engine = engine_of(get_settings())
    try:
        for message_id, letter in newest.items():
            if replay:
                engine.broker.send([letter.message], timeout_seconds=_PUBLISH_SECONDS, committed=True)
            dead_letter_notes.settle(group, [(message_id, letter.stored_milliseconds)], is_discarded=not replay)
    finally:
        engine.broker.close()
    return len(newest)


# -- transactions ---------------------------------------------------------------------------------------


def open_transactions(producer_group: str | None = None) -> list[dict[str, Any]]:
    """The undecided transactions of a producer group (default: of this service), oldest first, as plain values.

    `ledger` is the outcome in the ledger, by which the next check will decide the transaction. Raises BrokerError.
    """
    halves = inspection.open_halves(brokers(), producer_group or get_settings().required_producer_group())
    outcomes = _outcomes({one.transaction_id: one.ledger_id for one in halves})
    return [
        {
            "transaction_id": str(one.transaction_id),
            "producer_group": one.producer_group,
            "message_id": str(one.message.message_id),
            "topic": one.message.topic,
            "key": one.message.key,
            "sent_at": one.sent_at.isoformat(),
            "checks": one.checks,
            "state": "given up by RocketMQ" if one.is_given_up else "undecided",
            "broker": one.broker,
            "ledger": outcomes[one.transaction_id],
        }
        for one in halves
    ]


def _outcomes(transactions: Mapping[UUID, UUID | None]) -> dict[UUID, str]:
    """What the ledgers of this service say about transactions (transaction id to ledger id)."""
    found: dict[UUID, str] = {}
    for alias in ledger_aliases(usable=True) if transactions else ():
        try:
            with closing(open_connection(alias)) as connection:
                identity = ledger.identity(connection)
                mine = [one for one, ledger_id in transactions.items() if identity and ledger_id == identity.ledger_id]
                rows = ledger.states(connection, mine)
        except DatabaseError as error:
            # The alias may belong to another broker, without a ledger. A ledger that is away is named as missing.
            logger.info("the ledger of alias %r cannot be read: %s", alias, str(error).strip())
            continue
        found |= {one: _OUTCOMES.get(rows.get(one, ""), "no row: it still runs, or was rolled back") for one in mine}
    return {one: found.get(one, "unknown: no readable database has its ledger") for one in transactions}


# -- metrics --------------------------------------------------------------------------------------------

_Figure = tuple[str, Sequence[tuple[Sequence[str], float]]]


def metric_families(figures: ServerFigures) -> Iterator[_Figure]:
    """The figures as metrics: name and rows. The names and labels are those of the bundled broker's metrics."""
    now = datetime.now(UTC)
    known = [one for one in figures.groups if one.is_known]
    yield "outbox_lag_messages", [([one.group, one.topic], one.lag) for one in known]
    yield "outbox_lag_seconds", [([one.group, one.topic], _age(one.oldest_at, now)) for one in known]
    yield "outbox_dead_letters", [([name], dead) for name, dead in figures.dead.items()]
    retrying = Counter[str]()
    for one in known:
        retrying[one.group] += one.retrying
    yield "outbox_retrying_messages", [([name], count) for name, count in retrying.items()]
    of = [figures.producer_group]
    undecided = [one for one in figures.halves if not one.is_given_up]
    yield "outbox_undecided_transactions", [(of, len({one.transaction_id for one in undecided}))]
    oldest = min((one.sent_at for one in undecided), default=None)
    yield "outbox_undecided_age_seconds", [(of, _age(oldest, now))] if oldest else []
    given_up = {one.transaction_id for one in figures.halves if one.is_given_up}
    yield "outbox_parked_transactions", [(of, len(given_up))]
    yield "outbox_queued_messages", [([one.topic], one.written) for one in figures.topics]
    yield "outbox_relay_messages", [([one.alias], one.waiting) for one in figures.relay]
    yield "outbox_relay_age_seconds", [([one.alias], _age(one.oldest_at, now)) for one in figures.relay]
    yield "outbox_relay_parked_messages", [([one.alias], one.parked) for one in figures.relay]


def _age(since: datetime | None, now: datetime) -> float:
    return 0.0 if since is None else max(0.0, (now - since).total_seconds())
