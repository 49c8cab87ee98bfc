"""Classification: one seeded case per class, exact boundaries, every pair of flags, and a plain-Python oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from spark.judging import classify, evidence
from spark.rules.rule import Messages
from tests.spark import frames, oracle
from tests.spark.oracle import (
    GRACE,
    LATE_AFTER,
    SINCE,
    STUCK_AFTER,
    UNTIL,
    WATERMARK,
    WITHIN,
    BusinessRow,
    History,
    Sent,
)

pytestmark = pytest.mark.timeout(300)

TICK = timedelta(microseconds=1)
AT = UNTIL - timedelta(hours=1)
FAR = UNTIL + timedelta(days=9_999)
ROW, MESSAGE = BusinessRow(at=AT), Sent(stored_at=AT)
DONE = ((AT + timedelta(seconds=1),), (AT + timedelta(seconds=1),))
HALF = Sent(stored_at=AT, state="undecided")
FINE = History(rows=(ROW,), messages=(MESSAGE,), effects=DONE)

# A change of a history without faults -> the (group, class) that it must get; without one: OK.
SEEDED: dict[str, tuple[History, dict[str, str]]] = {
    "ok": (FINE, {}),
    "pending": (History(rows=(BusinessRow(at=UNTIL),), messages=(MESSAGE,)), {"": "PENDING"}),
    "lost": (History(rows=(ROW,)), {"": "LOST"}),
    "lost although rolled back": (
        History(rows=(ROW,), messages=(replace(MESSAGE, state="rolled_back"),)),
        {"": "LOST"},
    ),
    "orphan": (History(messages=(MESSAGE,)), {"": "ORPHAN"}),
    "orphan effect": (History(effects=((AT,), ())), {"logistics": "ORPHAN"}),
    "half stuck": (History(rows=(ROW,), messages=(HALF,)), {"": "HALF_STUCK"}),
    "half stuck without a row": (History(messages=(HALF,)), {"": "HALF_STUCK"}),
    "parked": (
        History(messages=(Sent(stored_at=UNTIL - TICK, state="parked"),)),
        {"": "HALF_STUCK"},
    ),
    "undelivered": (replace(FINE, effects=(DONE[0], ())), {"points": "UNDELIVERED"}),
    "dead": (replace(FINE, effects=(DONE[0], ()), dead=(False, True)), {"points": "DEAD"}),
    "duplicate": (replace(FINE, messages=(MESSAGE, MESSAGE)), {"": "DUPLICATE"}),
    "duplicate effect": (replace(FINE, effects=(DONE[0] * 2, DONE[1])), {"logistics": "DUPLICATE"}),
    "mismatch": (replace(FINE, messages=(replace(MESSAGE, total=Decimal("12.51")),)), {"": "MISMATCH"}),
    "mismatch null": (replace(FINE, messages=(replace(MESSAGE, customer=None),)), {"": "MISMATCH"}),
    "same number otherwise written": (replace(FINE, messages=(replace(MESSAGE, total=Decimal("12.5000")),)), {}),
    "both null": (
        replace(FINE, rows=(replace(ROW, customer=None),), messages=(replace(MESSAGE, customer=None),)),
        {},
    ),
    "late": (replace(FINE, messages=(replace(MESSAGE, decided_at=AT + LATE_AFTER + TICK),)), {"": "LATE"}),
    "late effect": (replace(FINE, effects=(DONE[0], (AT + WITHIN + TICK,))), {"points": "LATE"}),
    "early effect": (replace(FINE, effects=(DONE[0], (AT - GRACE - TICK,))), {"points": "EARLY"}),
    "early: exactly the grace": (replace(FINE, effects=(DONE[0], (AT - GRACE,))), {}),
    "early: before its message was due": (
        replace(FINE, messages=(replace(MESSAGE, deliver_at=AT + WITHIN),), effects=(DONE[0], (AT + WITHIN - GRACE,))),
        {"logistics": "EARLY"},
    ),
    "not early: one of two messages was due at once": (
        replace(FINE, messages=(MESSAGE, replace(MESSAGE, deliver_at=AT + WITHIN))),
        {"": "DUPLICATE"},
    ),
    "not early: of two messages, the effects may be those of the first": (
        replace(
            FINE, rows=(replace(ROW, at=AT + WITHIN),), messages=(MESSAGE, replace(MESSAGE, stored_at=AT + WITHIN))
        ),
        {"": "DUPLICATE"},
    ),
    "early: before both messages": (
        replace(FINE, messages=(MESSAGE, MESSAGE), effects=(DONE[0], (AT - GRACE - TICK,))),
        {"": "DUPLICATE", "points": "EARLY"},
    ),
    "a row of the future is compared with its message": (
        replace(FINE, rows=(replace(ROW, at=FAR, total=Decimal(1)),)),
        {"": "MISMATCH", "logistics": "EARLY", "points": "EARLY"},
    ),
    "a row of the future that equals its message is no finding": (
        replace(FINE, rows=(replace(ROW, at=FAR),), effects=((FAR,), (FAR,))),
        {},
    ),
    "a row of the future: an hour after the watermark": (
        replace(FINE, rows=(replace(ROW, at=WATERMARK + timedelta(hours=1), total=Decimal(1)),)),
        {"": "PENDING"},
    ),
    "a row of the last grace waits, however old its message": (
        replace(FINE, rows=(replace(ROW, at=WATERMARK - TICK, total=Decimal(1)),)),
        {"": "PENDING"},
    ),
    "unreadable": (replace(FINE, messages=(replace(MESSAGE, damage=b'{"customer": "ann'),)), {"": "UNREADABLE"}),
    "unreadable bytes": (
        replace(FINE, messages=(replace(MESSAGE, damage=b'{"customer": "\xff"}'),)),
        {"": "UNREADABLE"},
    ),
    "unreadable tail": (replace(FINE, messages=(replace(MESSAGE, damage=b"{} x"),)), {"": "UNREADABLE"}),
    "unreadable field": (
        replace(FINE, messages=(replace(MESSAGE, damage=b'{"price": {"total": "a lot"}}'),)),
        {"": "UNREADABLE"},
    ),
    "recalled owes no effect": (History(rows=(ROW,), messages=(replace(MESSAGE, state="recalled"),)), {}),
    "delayed is not overdue": (
        History(rows=(ROW,), messages=(replace(MESSAGE, deliver_at=UNTIL + timedelta(days=1)),)),
        {"logistics": "PENDING", "points": "PENDING"},
    ),
    # Exact boundaries.
    "grace: just old enough": (History(rows=(BusinessRow(at=WATERMARK - GRACE - TICK),)), {"": "LOST"}),
    "grace: exactly": (History(rows=(BusinessRow(at=WATERMARK - GRACE),)), {"": "PENDING"}),
    "window: its first moment": (History(rows=(BusinessRow(at=SINCE),)), {"": "LOST"}),
    "window: just before": (History(rows=(BusinessRow(at=SINCE - TICK),)), {}),
    "a second message comes to an older row": (
        History(
            rows=(BusinessRow(at=SINCE - TICK),),
            messages=(Sent(stored_at=SINCE - TICK), MESSAGE),
            effects=((SINCE,), (SINCE,)),
        ),
        {"": "DUPLICATE"},
    ),
    "a second effect comes to an older row": (
        History(
            rows=(BusinessRow(at=SINCE - TICK),),
            messages=(Sent(stored_at=SINCE - TICK),),
            effects=((SINCE - TICK, SINCE), (SINCE,)),
        ),
        {"logistics": "DUPLICATE"},
    ),
    "a second half is still undecided": (
        replace(FINE, messages=(MESSAGE, Sent(stored_at=UNTIL, state="undecided"))),
        {"": "PENDING"},
    ),
    "recalled and sent again": (replace(FINE, messages=(replace(MESSAGE, state="recalled"), MESSAGE)), {}),
    "a recalled message does not delay the next one": (
        replace(
            FINE,
            messages=(replace(MESSAGE, state="recalled", deliver_at=UNTIL + timedelta(days=1)), MESSAGE),
            effects=(DONE[0], ()),
        ),
        {"points": "UNDELIVERED"},
    ),
    "sent twice, one recalled, the other differs": (
        replace(FINE, messages=(replace(MESSAGE, total=Decimal(1)), replace(MESSAGE, state="recalled"))),
        {"": "MISMATCH"},
    ),
    "late: exactly the limit": (replace(FINE, messages=(replace(MESSAGE, decided_at=AT + LATE_AFTER),)), {}),
    "effect: exactly the limit": (replace(FINE, effects=(DONE[0], (AT + WITHIN,))), {}),
    "overdue: exactly the limit": (
        History(
            rows=(BusinessRow(at=WATERMARK - WITHIN),),
            messages=(Sent(stored_at=WATERMARK - WITHIN),),
            effects=((WATERMARK - WITHIN,), ()),
        ),
        {"points": "PENDING"},
    ),
    "overdue: just past": (
        History(
            rows=(BusinessRow(at=WATERMARK - WITHIN - TICK),),
            messages=(Sent(stored_at=WATERMARK - WITHIN - TICK),),
            effects=((WATERMARK - WITHIN,), ()),
        ),
        {"points": "UNDELIVERED"},
    ),
    "stuck: exactly the limit": (
        History(messages=(Sent(stored_at=WATERMARK - STUCK_AFTER, state="undecided"),)),
        {"": "PENDING"},
    ),
    "stuck: just past": (
        History(messages=(Sent(stored_at=WATERMARK - STUCK_AFTER - TICK, state="undecided"),)),
        {"": "HALF_STUCK"},
    ),
    "tolerance: exactly": (replace(FINE, messages=(replace(MESSAGE, weight=Decimal("1.5")),)), {}),
    "tolerance: just past": (replace(FINE, messages=(replace(MESSAGE, weight=Decimal("1.5001")),)), {"": "MISMATCH"}),
    # A decision that came after the boundary proves nothing yet about a row.
    "settled after the boundary": (History(messages=(replace(MESSAGE, decided_at=UNTIL),)), {"": "PENDING"}),
}

# Changes that make one flag hold each; all pairs of them are tried on one history.
Change = Callable[[History], History]
MESSAGE_FLAGS: dict[str, Change] = {
    "HALF_STUCK": lambda h: replace(h, messages=(*h.messages, HALF)),
    "UNREADABLE": lambda h: replace(h, messages=(replace(h.messages[0], damage=b"{"), *h.messages[1:])),
    "DUPLICATE": lambda h: replace(h, messages=(*h.messages, replace(h.messages[-1], state="committed"))),
    "MISMATCH": lambda h: replace(h, rows=tuple(replace(row, total=Decimal(1)) for row in h.rows)),
    "LATE": lambda h: replace(h, messages=tuple(replace(m, decided_at=AT + LATE_AFTER + TICK) for m in h.messages)),
    "ORPHAN": lambda h: replace(h, rows=()),
}
GROUP_FLAGS: dict[str, Change] = {
    "DEAD": lambda h: replace(h, dead=(True, False)),
    "UNDELIVERED": lambda h: replace(h, effects=((), h.effects[1])),
    "DUPLICATE": lambda h: replace(h, effects=(h.effects[0] * 2, h.effects[1])),
    "EARLY": lambda h: replace(h, effects=(tuple(at - 2 * GRACE for at in h.effects[0]), h.effects[1])),
    "LATE": lambda h: replace(h, effects=(tuple(at + WITHIN for at in h.effects[0]), h.effects[1])),
}
PAIRS = {
    f"{one}+{two}": change_two(change_one(FINE))
    for changes in (MESSAGE_FLAGS, GROUP_FLAGS)
    for one, change_one in changes.items()
    for two, change_two in changes.items()
    if one != two
}

MOMENTS = (
    SINCE - TICK,
    SINCE,
    AT,
    AT + LATE_AFTER + TICK,
    AT + WITHIN + TICK,
    WATERMARK - STUCK_AFTER,
    WATERMARK - WITHIN,
    UNTIL - TICK,
    UNTIL,
    WATERMARK,
    WATERMARK + timedelta(hours=1),
    WATERMARK + timedelta(hours=1) + TICK,
)
WEIGHTS = (None, Decimal("1.0"), Decimal("1.5"), Decimal("1.51"))
CUSTOMERS = ("ann", "bob", "", None, "<b>'")
STATES = ("committed", "committed", "committed", "committed", "undecided", "parked", "rolled_back", "recalled")
DAMAGES = (None, None, None, None, b"", b"{", b"\xff\xfe", b"{} x", b'{"price": {"total": "x"}}')


def random_history(random: Random) -> History:
    """Any history. Times are few, so that they meet each other and the limits."""

    def row() -> BusinessRow:
        return BusinessRow(at=random.choice(MOMENTS), customer=random.choice(CUSTOMERS), weight=random.choice(WEIGHTS))

    def sent() -> Sent:
        return Sent(
            stored_at=random.choice(MOMENTS),
            state=random.choice(STATES),
            decided_at=random.choice((None, *MOMENTS)),
            decided_by=random.choice("PPK"),
            deliver_at=random.choice((None, None, *MOMENTS)),
            customer=random.choice(CUSTOMERS),
            weight=random.choice(WEIGHTS),
            damage=random.choice(DAMAGES),
        )

    return History(
        rows=tuple(row() for _ in range(random.choice((0, 1, 1, 1)))),
        messages=tuple(sent() for _ in range(random.choice((0, 1, 1, 1, 2, 3)))),
        effects=tuple(tuple(random.choice(MOMENTS) for _ in range(random.choice((0, 1, 1, 2)))) for _ in range(2)),
        dead=(random.random() < 0.1, random.random() < 0.1),
    )


@pytest.fixture(scope="module")
def found(spark_session: SparkSession) -> frames.Found:
    """All seeded cases and pairs, classified in one job."""
    seeded = {f"seeded {name}": history for name, (history, _) in SEEDED.items()}
    pairs = {f"pair {name}": history for name, history in PAIRS.items()}
    return frames.classes(spark_session, {**seeded, **pairs})


@pytest.mark.parametrize("name", SEEDED)
def test_one_seeded_case_per_class_and_exact_boundaries(name: str, found: frames.Found) -> None:
    history, wanted = SEEDED[name]
    actual = {group: found[key, group][0] for key, group in found if key == f"seeded {name}"}
    assert actual == wanted
    assert dict(oracle.expected(history)) == wanted, "the oracle itself is wrong"


@pytest.mark.parametrize("name", PAIRS)
def test_every_pair_of_flags_has_its_precedence(name: str, found: frames.Found) -> None:
    history = PAIRS[name]
    actual = {group: found[key, group][0] for key, group in found if key == f"pair {name}"}
    assert actual == dict(oracle.expected(history))
    flags = {flag for key, group in found if key == f"pair {name}" for flag in found[key, group][1]}
    assert flags == {
        flag
        for subject in (oracle.message_flags(history), *(oracle.group_flags(history, n) for n in range(2)))
        for flag in subject
        if oracle.first(subject) != "OK" and flag not in ("OK", "PENDING")
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", Messages)
@settings(max_examples=1, deadline=None, database=None)
@given(random=st.randoms(use_true_random=True))
def test_classification_equals_a_plain_python_oracle(
    spark_session: SparkSession, random: Random, kind: Messages
) -> None:
    by_key = {f"key {number}": random_history(random) for number in range(3_000)}
    found = frames.classes(spark_session, by_key, kind)
    actual = {(key, group): name for (key, group), (name, _) in found.items()}
    wanted = {(key, group): name for key, history in by_key.items() for group, name in oracle.expected(history, kind)}
    differing = sorted({subject for subject, _ in set(actual.items()) ^ set(wanted.items())})[:3]
    assert actual == wanted, [
        (subject, actual.get(subject), wanted.get(subject), by_key[subject[0]]) for subject in differing
    ]


def test_a_hot_row_is_compared_when_its_newest_message_is_settled(spark_session: SparkSession) -> None:
    """at_least_one: the message of a later state is seen before the row's, or the row's before its message."""
    other = replace(MESSAGE, total=Decimal(1))
    histories = {
        "settled": replace(FINE, messages=(MESSAGE, other)),
        "newer than the boundary": replace(FINE, messages=(MESSAGE, replace(other, decided_at=UNTIL))),
        "newest undecided": replace(FINE, messages=(other, Sent(stored_at=UNTIL, state="undecided"))),
        "equal": replace(FINE, messages=(other, replace(MESSAGE, decided_at=UNTIL))),
    }
    found = frames.classes(spark_session, histories, Messages.AT_LEAST_ONE)
    assert {key: name for (key, _), (name, _) in found.items()} == {
        "settled": "MISMATCH",
        "newer than the boundary": "PENDING",
        "newest undecided": "PENDING",
    }


def test_of_several_messages_the_one_committed_last_is_compared(spark_session: SparkSession) -> None:
    """at_least_one: the order of the log is that of the commits only where the row's transaction wrote the message."""
    other, second = replace(MESSAGE, total=Decimal(1)), timedelta(seconds=1)
    prompt = replace(MESSAGE, decided_at=AT + 3 * second)
    late = replace(MESSAGE, decided_at=AT + 3 * second, decided_by="K")
    sooner = replace(other, decided_at=AT + 2 * second)
    histories = {
        "stored first, committed last, equal": replace(FINE, messages=(prompt, sooner)),
        "stored last, committed first, equal": replace(
            FINE, messages=(replace(prompt, total=Decimal(1)), replace(sooner, total=MESSAGE.total))
        ),
        "a check-back says nothing of the order": replace(FINE, messages=(late, sooner)),
        "nor the other way": replace(
            FINE, messages=(replace(late, total=Decimal(1)), replace(sooner, total=MESSAGE.total))
        ),
        "neither is equal": replace(FINE, messages=(replace(late, total=Decimal(2)), sooner)),
        "in one transaction with the row: by the log": replace(
            FINE, messages=(replace(MESSAGE, stored_at=AT + second), other)
        ),
        "the same, equal": replace(FINE, messages=(replace(other, stored_at=AT + second), MESSAGE)),
    }
    found = frames.classes(spark_session, histories, Messages.AT_LEAST_ONE)
    assert {key: name for (key, group), (name, _) in found.items() if not group} == {
        "stored last, committed first, equal": "MISMATCH",
        "neither is equal": "MISMATCH",
        "in one transaction with the row: by the log": "MISMATCH",
    }


def test_each_of_several_messages_owes_an_effect(spark_session: SparkSession) -> None:
    """at_least_one: an effect of the older message says nothing of the newer one."""
    newer = replace(MESSAGE, stored_at=AT + timedelta(minutes=5))
    young = replace(MESSAGE, stored_at=UNTIL - timedelta(minutes=1))
    of_older, of_newer = AT + timedelta(seconds=1), newer.stored_at + timedelta(seconds=1)
    histories = {
        "the older one alone": replace(FINE, messages=(MESSAGE, newer), effects=((of_older,), (of_older, of_newer))),
        "one effect for all of them": replace(FINE, messages=(MESSAGE, newer), effects=((of_newer,), (of_newer,))),
        # A burst of which the effect of the middle, or of the newest message is missing.
        "two effects of three": replace(
            FINE, messages=(MESSAGE, MESSAGE, newer), effects=((of_older, of_newer), (of_older, of_older, of_newer))
        ),
        "within its limit": replace(FINE, messages=(MESSAGE, young), effects=((of_older,), (of_older, UNTIL))),
        "recalled": replace(FINE, messages=(MESSAGE, replace(newer, state="recalled"))),
    }
    found = frames.classes(spark_session, histories, Messages.AT_LEAST_ONE)
    assert {subject: name for subject, (name, _) in found.items()} == {
        ("the older one alone", "logistics"): "UNDELIVERED",
        ("two effects of three", "logistics"): "UNDELIVERED",
        ("within its limit", "logistics"): "PENDING",
    }


@pytest.mark.soak
def test_hot_key_with_a_million_messages(spark_session: SparkSession) -> None:
    """Aggregated where it is read: no task holds the messages of the key."""
    rule = oracle.rule()
    base = frames.classified(spark_session, {"hot": FINE})
    assert base.count() == 0
    million = spark_session.range(1_000_000).select(
        F.lit("hot").alias("key"),
        F.col("id").alias("log_id"),
        F.lit(AT).alias("at"),
        F.lit(AT).alias("decided_at"),
        F.lit(None).cast("timestamp").alias("deliver_at"),
        F.lit("committed").alias("state"),
        F.lit("application/json").alias("content_type"),
        F.lit(MESSAGE.body).alias("body"),
    )
    row = spark_session.createDataFrame(frames._table({"hot": FINE}))
    sides = [evidence.table_side(row, rule), evidence.broker_side(million, rule)]
    gathered = evidence.gather(sides, rule, WATERMARK)
    subjects = classify.subjects(classify.with_classes(gathered, rule, frames.WINDOW), rule, frames.WINDOW)
    assert [(row["key"], row["class"], row["committed"]) for row in subjects.collect()] == [
        ("hot", "DUPLICATE", 1_000_000)
    ]
