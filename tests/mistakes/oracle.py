"""The rows that a program may leave: business rows = messages = effects.

It looks when the program is over, whatever it raised, when check-back has settled every half message and all
consumers are done. The word *bound* is about a `Pair` (or the row and the message of a decorated function): its row
and its publish call stand directly beside each other, so the database runs them in one and the same transaction,
whatever happened before and whatever happens after. What else the program writes adds nothing: rows of one
transaction stand or fall together because the database says so.

For a pair inside `atomic()`:

1. A bound row exists if and only if its message was delivered, once. It does not matter who committed: rows that a
   raw COMMIT committed together with the publish call must have their messages, rows that a raw ROLLBACK took away
   must have none, and an exception that Django raises later changes neither. (LOST, PHANTOM, DOUBLE) Where publish was
   refused, the program caught the error, and then committed by hand what Django would have rolled back, the row without
   its message is the application's own.
2. `publish` is refused, with an error, where no live transaction could carry it: in a transaction that an error has
   aborted, on a closed connection, and on SQLite after a raw COMMIT or ROLLBACK. (UNREFUSED)
3. A pair whose row comes first is not bound where there was no live transaction when the row was written: then it
   was committed on its own, and atomicity was the application's to lose. What remains is that the refused message
   is not delivered. Inside a pipeline the client cannot see whether there was one; there the oracle claims only
   that no message is without its row.
4. `ROLLBACK; BEGIN`, `COMMIT; BEGIN` and AND CHAIN leave a live transaction that is not the block's; so do a raw
   COMMIT or ROLLBACK on PostgreSQL, where psycopg begins another with the next statement. A publish call in it may
   be refused, or be consistent with the transaction it really ran in: rule 1 as it stands.
5. A decorated function whose block is the outermost one may return without an exception only if its row is
   committed, unless Django was told to roll back (set_rollback, a swallowed error of the ORM). (SILENT)
6. For a publish call in a plain `atomic()` the producer never reports ROLLBACK: it has no proof. (GUESSED)

Outside of `atomic()` a message is delivered if and only if `publish` returned: rows have no say.

For a handler, which is called until the message counts as handled and then once more, each of the two parts of its
effect at the top level of the handler:

7. It counts as handled at the latest at the second attempt without a mistake. (STUCK)
8. The attempt that handled it has left each part exactly once; a part that it wrote after a COMMIT by hand is the
   application's own. A message that is skipped because an earlier attempt is in the inbox has each part. (NO EFFECT)
9. A failed attempt leaves nothing, unless it ran transaction statements by hand: what it committed itself nobody can
   take back, and the next attempt may do it again. Else no part exists twice. (TWICE)
10. A message is given up (PermanentError) only where the handler committed a part by hand and then failed: no attempt
    can repair that, and somebody is told. Rule 9 holds. (STUCK)
11. What a handler publishes obeys the rules of pairs.
12. Messages that shared its transaction have their effect exactly once. (NO EFFECT, TWICE)

For a handler with effects="outside", whose parts are in one `finish`, rules 7 to 11 hold, too, and:

13. What it writes outside of steps and `finish` is refused. Other threads are not seen. (STRAY)
14. A step that has returned in one attempt is not called again, and a step with `once` is called once. (REPEATED)
15. If the handler returns before the `finish` with the parts, or another `finish` comes first, the message is done, and
    the parts are the application's own. A message is also given up if the result of a step cannot be stored.

Every call of a handler, also a repeated one, and those of the messages that share its transaction:

16. It gets the published body, and meets no language, time zone, context variable or setting of the session that an
    earlier call has left behind. (LEFTOVER)

For messages with a unique key, whose time does not end while a program runs:

17. At most one message of a key is delivered, and none of a key that another session holds. (UNIQUE)
18. A duplicate is not delivered, and its bound row needs no message of its own. If the row exists, the message that the
    receipt names was delivered. (PHANTOM, UNIQUE)
19. A bound row without its message exists only if another message of its key was delivered. (LOST)

For messages with a hostile text, number or time (values.py) in their key, tag, headers, body or time of delivery:

20. `publish` refuses it as a mistake of the caller (UsageError) before the database sees it, or consumers get the
    message as it was given. (ALTERED)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from uuid import UUID

from tests.mistakes.others import HELD_KEY
from tests.mistakes.traces import AttemptSeen, PairSeen, Sent, Trace


class Kind(StrEnum):
    """Which rule was broken."""

    LOST = "a committed row without its message"
    PHANTOM = "a delivered message without its row"
    DOUBLE = "a message delivered twice"
    UNREFUSED = "publish accepted where no live transaction could carry it"
    SILENT = "a decorated function returned although nothing was committed"
    GUESSED = "the producer reported ROLLBACK for a plain atomic()"
    STUCK = "a message that no clean attempt could handle"
    NO_EFFECT = "a message that counts as handled without its effect"
    TWICE = "an effect that happened twice, or in an attempt that failed"
    STRAY = "a write outside of steps and finish that stayed"
    REPEATED = "a step that was called again although it had returned, or may be called once only"
    LEFTOVER = "a call of a handler that met what an earlier call had left behind"
    ALTERED = "a hostile value that a consumer got as another, or that only the driver refused"
    UNIQUE = "two messages of one unique key, or a duplicate of no message"


@dataclass(frozen=True)
class Finding:
    """One broken rule, and where."""

    kind: Kind
    where: str

    def __str__(self) -> str:
        return f"{self.kind.name}: {self.kind} ({self.where})"


@dataclass
class State:
    """The contents of the databases, by name, once all transactions are decided and handled."""

    rows: Set[str] = field(default_factory=set)
    delivered: Mapping[str, int] = field(default_factory=dict)
    delivered_ids: Set[UUID] = field(default_factory=set)
    # The keys of messages for which the producer itself reported ROLLBACK.
    rolled_back_by_producer: Set[str] = field(default_factory=set)
    effects: Counter[str] = field(default_factory=Counter)
    received: Mapping[str, Sent] = field(default_factory=dict)


def judge(trace: Trace, state: State) -> list[Finding]:
    """Every rule that the run broke."""
    found = [
        Finding(kind, pair.key)
        for pair in trace.pairs
        for kind in _pair(pair, state)
        if kind is not Kind.LOST or pair.returned or not trace.committed_after_refusal
    ]
    of_key = Counter(pair.unique for pair in trace.pairs if pair.unique and state.delivered.get(pair.key))
    found += [Finding(Kind.UNIQUE, key) for key, count in of_key.items() if count > (key != HELD_KEY)]
    found = [
        item
        for item in found
        if item.kind is not Kind.LOST
        or not any(pair.key == item.where and of_key[pair.unique] for pair in trace.pairs if pair.unique)
    ]
    for key in trace.others:
        if state.effects[key] != 1:
            found.append(Finding(Kind.TWICE if state.effects[key] else Kind.NO_EFFECT, key))
    for key in trace.keys:
        found += [Finding(kind, where) for kind, where in _handled(key, trace.attempts, state)]
    found += [Finding(Kind.STRAY, row) for row in trace.strays if row in state.rows]
    found += [Finding(Kind.LEFTOVER, f"{what} of {trace.name}") for what in sorted(set(trace.leftovers))]
    found += [Finding(Kind.REPEATED, f"{name} of {trace.name}") for name in _repeated(trace.attempts)]
    return found


def _repeated(attempts: list[AttemptSeen]) -> Iterator[str]:
    closed: set[str] = set()
    for attempt in attempts:
        for name, what in attempt.steps:
            if what == "called" and name in closed:
                yield name
            if what == "returned" or name.endswith("once"):
                closed.add(name)


def _pair(seen: PairSeen, state: State) -> Iterator[Kind]:
    row, count = seen.key in state.rows, state.delivered.get(seen.key, 0)
    if count > 1:
        yield Kind.DOUBLE
    if seen.foreign or (seen.sent is not None and count and not _is_same(seen.sent, state.received[seen.key])):
        yield Kind.ALTERED
    if not seen.in_block:
        if bool(count) != seen.returned:
            yield Kind.PHANTOM if count else Kind.LOST
        return
    if seen.duplicate_of is not None:
        if count:
            yield Kind.PHANTOM
        if row and seen.duplicate_of not in state.delivered_ids and not (seen.row_first and seen.alive is not True):
            yield Kind.UNIQUE
        return
    if seen.alive is False and seen.returned and not (seen.decorated and not seen.row_first):
        yield Kind.UNREFUSED
    if seen.row_first and seen.alive is False:
        if count and not seen.returned:
            yield Kind.PHANTOM
    elif count and not row:
        yield Kind.PHANTOM
    elif row and not count and not (seen.row_first and seen.alive is None):
        yield Kind.LOST
    if seen.claims_commit and not row:
        yield Kind.SILENT
    if not seen.decorated and seen.key in state.rolled_back_by_producer:
        yield Kind.GUESSED


def _is_same(sent: Sent, received: Sent) -> bool:
    own = {name: value for name, value in received.headers.items() if name in sent.headers}
    return replace(received, headers=own) == sent


def _handled(key: str, attempts: list[AttemptSeen], state: State) -> Iterator[tuple[Kind, str]]:
    if attempts[-1].given_up:
        odd = attempts[-1].error.startswith("PermanentError") and "cannot be stored" in attempts[-1].error
        if not any(item.committed_by_hand for item in attempts) and not odd:
            yield Kind.STUCK, key
        return
    settled = next((number for number, item in enumerate(attempts, 1) if item.counts_as_handled), None)
    if settled is None:
        yield Kind.STUCK, key
        return
    handling = attempts[settled - 1]
    if handling.reached_finish is False or (handling.finishes and not handling.finishes[0]):
        return
    for part in (1, 2):
        by_attempt = {number: state.effects[f"{key}/{part}/{number}"] for number in range(1, len(attempts) + 1)}
        where = f"part {part} of {key}, attempt {settled}"
        own = sum(count for number, count in by_attempt.items() if not attempts[number - 1].by_hand)
        if handling.skipped:
            if not any(by_attempt.values()):
                yield Kind.NO_EFFECT, where
            if own > 1:
                yield Kind.TWICE, where
            continue
        excused = (part, True) in handling.effects
        if by_attempt[settled] == 0 and not excused:
            yield Kind.NO_EFFECT, where
        if own > (not handling.by_hand) or by_attempt[settled] > 1:
            yield Kind.TWICE, where
