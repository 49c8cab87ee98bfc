"""Slots and tokens: the state of the limits of subscriptions in the broker's database.

A **slot** is the right of one instance to run one handler call. A slot has a number from 1 to its limit, and the
primary key allows one row per number. So the instances never hold more slots than the limit, however they take,
release and lose them. A slot expires unless its instance renews it. An instance relies on its slots only for the time
that `leases` explains under "Trust", so it starts no handler after another instance may have taken its slots.

A **token** is the right to start one message. The bucket stores the time of its next token. To take tokens, an
instance moves this time forward, and gets the times at which it may start messages.

See decision 209.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from psycopg.types.json import Jsonb

from outbox.broker.database import arrays
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.groups.leases import lease_clock
from outbox.contrib.limits.declaration import Limits
from outbox.subscription import Subscription

SubscriptionKey = tuple[int, int]
"""(group_id, topic_id)"""

# The key of the slots of the limit `running`.
ALL_KEYS: Final = ""
# An instance takes the tokens that are due within this time (seconds). If an instance is killed, at most the tokens of
# this time are lost, and at least one.
LEAD_SECONDS: Final = 0.2
# If there are fewer slots than instances that want one, each instance holds a slot for about this time (seconds).
_ROTATION_SECONDS: Final = 2.0
# An instance tells the others about at most this number of keys for which it waits.
_KEYS_TOLD: Final = 50


# -- declared limits -------------------------------------------------------------------------------


_DECLARE = Statement("""
INSERT INTO {schema}.subscription_limit AS known (group_id, topic_id, declared)
VALUES (%(group_id)s, %(topic_id)s, %(declared)s)
ON CONFLICT (group_id, topic_id) DO UPDATE SET declared = excluded.declared, changed_at = clock_timestamp()
WHERE known.declared IS DISTINCT FROM excluded.declared
""")
_ADD_BUCKET = Statement("""
INSERT INTO {schema}.bucket (group_id, topic_id, next_at) VALUES (%(group_id)s, %(topic_id)s, '-infinity')
ON CONFLICT (group_id, topic_id) DO NOTHING
""")
_WITHDRAW = Statement("""
DELETE FROM {schema}.subscription_limit WHERE group_id = %(group_id)s AND topic_id = %(topic_id)s
""")


def declare(run: Executor, key: SubscriptionKey, limits: Limits) -> None:
    """Store the limits that the code declares."""
    run.execute(_DECLARE, _of(key) | {"declared": Jsonb(limits.stored())})


# During a deployment, a process with older code may start after the last process with newer code.
_DECLARE_AGAIN = Statement("""
UPDATE {schema}.subscription_limit SET declared = %(declared)s, changed_at = clock_timestamp()
WHERE group_id = %(group_id)s AND topic_id = %(topic_id)s AND declared IS DISTINCT FROM %(declared)s
""")


def declare_again(run: Executor, key: SubscriptionKey, limits: Limits) -> None:
    """Store the limits that the code declares, unless a process whose code declares no limits has withdrawn them."""
    run.execute(_DECLARE_AGAIN, _of(key) | {"declared": Jsonb(limits.stored())})


def declare_or_withdraw(run: Executor, key: SubscriptionKey, subscription: Subscription) -> None:
    """Store what the code of a process declares, because the process registers the subscription."""
    found = next((option for option in subscription.options if isinstance(option, Limits)), None)
    if found is not None:
        declare(run, key, found)
    else:
        withdraw(run, key)


def withdraw(run: Executor, key: SubscriptionKey) -> None:
    """Remove the limits of a subscription and an operator's override, because the code declares no limits."""
    run.execute(_WITHDRAW, _of(key))


_FORGET_SUBSCRIPTION = [
    Statement(f"DELETE FROM {{schema}}.{table} WHERE group_id = %(group_id)s AND topic_id = %(topic_id)s")
    for table in ("subscription_limit", "slot", "slot_demand", "bucket")
]


def forget(run: Executor, key: SubscriptionKey) -> None:
    """Remove all rows about a subscription, because it is deleted."""
    for statement in _FORGET_SUBSCRIPTION:
        run.execute(statement, _of(key))


# -- slots -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SlotsHeld:
    """The slots of this instance after a renewal, and what the other instances want.

    `limits`: the limits that hold now; None if another process has removed the declaration. `numbers`: the numbers of
    this instance's slots by key; None if only the demand was renewed. `wanted`: the number of slots of the limit
    `running` that each live instance wants. `contested`: the keys for which other instances wait. `rotation`: grows by
    one with each rotation of the slots. `trusted_until`: the time by `lease_clock` until which this instance may rely
    on renewed slots.
    """

    limits: Limits | None
    numbers: Mapping[str, set[int]] | None
    wanted: Mapping[UUID, int]
    contested: frozenset[str]
    rotation: int
    trusted_until: float


@dataclass(frozen=True, slots=True)
class Demand:
    """What an instance wants, for the other instances and for operators.

    `wanted`: slots of the limit `running`. `in_use`: running handler calls. `waiting`: messages that wait for the limit
    named `waiting_for`. `waiting_seconds`: for how long messages have waited without a break. `keys`: keys whose slots
    are taken.
    """

    wanted: int
    in_use: int
    waiting: int = 0
    waiting_for: str = ""
    waiting_seconds: float | None = None
    keys: Sequence[str] = ()


# All statements lock the rows of slots in the order of the primary key, so that no two of them can deadlock: if this
# process was frozen until its slots expired, another process may be taking them now. Then they join the locked rows by
# all four columns of the primary key. With constants for the first two columns, PostgreSQL compares each locked row
# with each slot of the subscription, because it expects one row.
_RENEW = Statement("""
WITH told AS (
    INSERT INTO {schema}.slot_demand AS known
        (group_id, topic_id, instance_id, wanted, in_use, waiting, waiting_for, waiting_since, keys, expires_at)
    VALUES (%(group_id)s, %(topic_id)s, %(instance)s, %(wanted)s, %(in_use)s, %(waiting)s, %(waiting_for)s,
            clock_timestamp() - make_interval(secs => %(waiting_seconds)s::double precision), %(keys)s::text[],
            clock_timestamp() + make_interval(secs => %(term)s))
    ON CONFLICT (group_id, topic_id, instance_id) DO UPDATE
    SET wanted = excluded.wanted, in_use = excluded.in_use, waiting = excluded.waiting,
        waiting_for = excluded.waiting_for, waiting_since = excluded.waiting_since, keys = excluded.keys,
        expires_at = excluded.expires_at
), mine AS (
    SELECT group_id, topic_id, key, number FROM {schema}.slot
    WHERE %(slots)s AND instance_id = %(instance)s AND group_id = %(group_id)s AND topic_id = %(topic_id)s
    ORDER BY key COLLATE "C", number FOR UPDATE
), renewed AS (
    UPDATE {schema}.slot AS held SET expires_at = clock_timestamp() + make_interval(secs => %(term)s)
    FROM mine
    WHERE held.group_id = mine.group_id AND held.topic_id = mine.topic_id AND held.key = mine.key
      AND held.number = mine.number AND held.instance_id = %(instance)s
    RETURNING held.key, held.number
), others AS (
    SELECT instance_id, wanted, keys FROM {schema}.slot_demand
    WHERE group_id = %(group_id)s AND topic_id = %(topic_id)s AND instance_id <> %(instance)s
      AND expires_at > clock_timestamp()
)
SELECT (SELECT jsonb_build_array(declared, override) FROM {schema}.subscription_limit
        WHERE group_id = %(group_id)s AND topic_id = %(topic_id)s),
       (SELECT coalesce(jsonb_agg(jsonb_build_array(key, number)), '[]') FROM renewed),
       (SELECT coalesce(jsonb_object_agg(instance_id, wanted), '{{}}') FROM others),
       (SELECT coalesce(jsonb_agg(DISTINCT key), '[]') FROM others, unnest(keys) AS key),
       floor(extract(epoch FROM clock_timestamp()) / %(rotation_seconds)s)::bigint
""")


def renew(
    run: Executor, key: SubscriptionKey, instance: UUID, demand: Demand, *, term_seconds: float, slots: bool = True
) -> SlotsHeld:
    """Renew the demand of an instance for `term_seconds`, and read what the other instances want.

    `slots`: renew the slots, too.
    """
    sent = lease_clock()
    limits, renewed, others, contested, rotation = run.one(
        _RENEW,
        _of(key)
        | {
            "instance": instance,
            "wanted": demand.wanted,
            "in_use": demand.in_use,
            "waiting": demand.waiting,
            "waiting_for": demand.waiting_for,
            "waiting_seconds": demand.waiting_seconds,
            "keys": arrays.texts(demand.keys[:_KEYS_TOLD]),
            "term": term_seconds,
            "rotation_seconds": _ROTATION_SECONDS,
            "slots": slots,
        },
    )
    numbers: dict[str, set[int]] | None = {} if slots else None
    for name, number in renewed:
        assert numbers is not None
        numbers.setdefault(name, set()).add(number)
    wanted = {UUID(other): count for other, count in others.items()} | {instance: demand.wanted}
    return SlotsHeld(
        None if limits is None else Limits(**limits[0]).changed(limits[1]),
        numbers,
        wanted,
        frozenset(contested),
        rotation,
        sent + term_seconds,
    )


# A number is free if it has no row, or if its row has expired. If two instances take one number at the same time, the
# second one finds the row of the first one, and gets nothing. The rows are inserted in the order of the primary key, so
# no two of these statements can deadlock. If n slots of a key are held, the first n + m numbers have m free ones; so
# a statement does not look at all numbers of a high limit.
_TAKE = Statement("""
INSERT INTO {schema}.slot AS held (group_id, topic_id, key, number, instance_id, expires_at)
SELECT %(group_id)s, %(topic_id)s, wanted.key, free.number, %(instance)s,
       clock_timestamp() + make_interval(secs => %(term)s)
FROM unnest(%(keys)s::text[], %(counts)s::integer[]) AS wanted (key, count)
CROSS JOIN LATERAL (
    SELECT number
    FROM generate_series(1, least(%(limit)s::integer, wanted.count + (
        SELECT count(*)::integer FROM {schema}.slot other
        WHERE other.group_id = %(group_id)s AND other.topic_id = %(topic_id)s AND other.key = wanted.key
          AND other.expires_at > clock_timestamp()
    ))) AS number
    WHERE NOT EXISTS (SELECT FROM {schema}.slot other
                      WHERE other.group_id = %(group_id)s AND other.topic_id = %(topic_id)s
                        AND other.key = wanted.key AND other.number = number.number
                        AND other.expires_at > clock_timestamp())
    ORDER BY number LIMIT wanted.count
) AS free
ORDER BY wanted.key COLLATE "C", free.number
ON CONFLICT (group_id, topic_id, key, number) DO UPDATE
SET instance_id = excluded.instance_id, expires_at = excluded.expires_at
WHERE held.expires_at < clock_timestamp()
RETURNING key, number
""")


def take(
    run: Executor, key: SubscriptionKey, instance: UUID, wanted: Mapping[str, int], *, limit: int, term_seconds: float
) -> dict[str, set[int]]:
    """Take free slots: for each key at most the wanted number. Return the numbers of the new slots by key.

    The slots are valid as long as the slots that the instance has renewed last. So the caller renews first.
    """
    rows = run.execute(
        _TAKE,
        _of(key)
        | {
            "instance": instance,
            "keys": arrays.texts(list(wanted)),
            "counts": arrays.integers(list(wanted.values())),
            "limit": limit,
            "term": term_seconds,
        },
    )
    taken: dict[str, set[int]] = {}
    for name, number in rows:
        taken.setdefault(name, set()).add(number)
    return taken


# The statement finds each slot by the primary key, and reads no other slots of the subscription. It locks the slots in
# the order of the arrays, which `release` sorts as the primary key does: Python and COLLATE "C" sort texts alike.
_RELEASE = Statement("""
WITH mine AS (
    SELECT locked.*
    FROM unnest(%(keys)s::text[], %(numbers)s::integer[]) AS given (key, number)
    CROSS JOIN LATERAL (
        SELECT group_id, topic_id, key, number FROM {schema}.slot AS other
        WHERE group_id = %(group_id)s AND topic_id = %(topic_id)s AND other.key = given.key
          AND other.number = given.number AND instance_id = %(instance)s
        FOR UPDATE
    ) AS locked
)
DELETE FROM {schema}.slot AS held USING mine
WHERE held.group_id = mine.group_id AND held.topic_id = mine.topic_id AND held.key = mine.key
  AND held.number = mine.number AND held.instance_id = %(instance)s
""")


def release(run: Executor, key: SubscriptionKey, instance: UUID, slots: Collection[tuple[str, int]]) -> None:
    """Release slots of an instance. Slots that another instance holds meanwhile stay unchanged."""
    ordered = sorted(slots)
    run.execute(
        _RELEASE,
        _of(key)
        | {
            "instance": instance,
            "keys": arrays.texts([name for name, _ in ordered]),
            "numbers": arrays.integers([number for _, number in ordered]),
        },
    )


_LEAVE = Statement("""
DELETE FROM {schema}.slot_demand
WHERE group_id = %(group_id)s AND topic_id = %(topic_id)s AND instance_id = %(instance)s
""")


def withdraw_demand(run: Executor, key: SubscriptionKey, instance: UUID) -> None:
    """Remove the demand of an instance, because it needs no slots now."""
    run.execute(_LEAVE, _of(key) | {"instance": instance})


_RELEASE_ALL = Statement("""
WITH mine AS (
    SELECT group_id, topic_id, key, number FROM {schema}.slot WHERE instance_id = %(instance)s
    ORDER BY group_id, topic_id, key COLLATE "C", number FOR UPDATE
), slots AS (
    DELETE FROM {schema}.slot AS held USING mine
    WHERE held.group_id = mine.group_id AND held.topic_id = mine.topic_id AND held.key = mine.key
      AND held.number = mine.number AND held.instance_id = %(instance)s
)
DELETE FROM {schema}.slot_demand WHERE instance_id = %(instance)s
""")
_FORGET = Statement("""
WITH dead AS (
    SELECT group_id, topic_id, key, number FROM {schema}.slot
    WHERE expires_at < clock_timestamp() - interval '1 minute' FOR UPDATE SKIP LOCKED
), slots AS (
    DELETE FROM {schema}.slot AS held USING dead
    WHERE held.group_id = dead.group_id AND held.topic_id = dead.topic_id AND held.key = dead.key
      AND held.number = dead.number AND held.expires_at < clock_timestamp() - interval '1 minute'
)
DELETE FROM {schema}.slot_demand WHERE expires_at < clock_timestamp() - interval '1 minute'
""")


def release_all(run: Executor, instance: UUID) -> None:
    """Release all slots of an instance whose handlers have certainly ended."""
    run.execute(_RELEASE_ALL, {"instance": instance})


def forget_the_dead(run: Executor) -> None:
    """Remove the rows of instances that died, one minute after the rows expired."""
    run.execute(_FORGET)


def fair_share(limit: int, wanted: Mapping[UUID, int], instance: UUID, rotation: int) -> int:
    """Return how many of `limit` slots an instance may hold, if the instances want more slots than there are.

    An instance that wants less than an equal share gets all it wants, and the others divide the rest. If there are
    fewer slots than instances, each slot goes from one instance to the next with every rotation.
    """
    left = limit
    asking = {other: count for other, count in wanted.items() if count > 0}
    while asking:
        each, rest = divmod(left, len(asking))
        modest = {other: count for other, count in asking.items() if count <= each}
        if not modest:
            order = sorted(asking)
            if instance not in asking:
                return 0
            place = (order.index(instance) - (rotation * rest if each == 0 else 0)) % len(order)
            return each + (place < rest)
        if instance in modest:
            return modest[instance]
        left -= sum(modest.values())
        asking = {other: count for other, count in asking.items() if other not in modest}
    return 0


# -- tokens ----------------------------------------------------------------------------------------


# The assignments see the newest version of the row, even if the statement has waited for another one. If the rate has
# changed, the next token keeps its distance from now in tokens and not in seconds. Otherwise, after a change from 1/day
# to 100/s, the subscription would wait for up to a day.
_TAKE_TOKENS = Statement("""
UPDATE {schema}.bucket AS bucket
SET (next_at, first_at, granted, interval_seconds) = (
    SELECT first_at + make_interval(secs => granted * %(interval)s::double precision), first_at, granted,
           %(interval)s::double precision
    FROM (SELECT clock_timestamp() AS now OFFSET 0) AS clock
    CROSS JOIN LATERAL (
        SELECT greatest(
            CASE WHEN bucket.next_at > now AND bucket.interval_seconds <> %(interval)s::double precision
                 THEN now + (bucket.next_at - now) * (%(interval)s::double precision / bucket.interval_seconds)
                 ELSE bucket.next_at END,
            now - make_interval(secs => (%(burst)s - 1) * %(interval)s::double precision)
        ) AS first_at
        OFFSET 0
    ) AS base
    CROSS JOIN LATERAL (
        SELECT greatest(%(used)s, least(%(used)s + %(wanted)s, greatest(%(used)s + 1, 1 + floor(
            (extract(epoch FROM now - first_at)::double precision + %(lead)s) / %(interval)s::double precision
        ))))::integer AS granted
    ) AS due
)
WHERE group_id = %(group_id)s AND topic_id = %(topic_id)s
RETURNING granted, extract(epoch FROM first_at - clock_timestamp())::double precision
""")


def take_tokens(
    run: Executor, key: SubscriptionKey, wanted: int, *, per_second: float, burst: int, used: int = 0
) -> list[float]:
    """Take at most `wanted` tokens. Return the times (time.monotonic) from which they are valid.

    The tokens are those that are due within LEAD_SECONDS. If no token is due within this time, the function takes the
    next one. Before these tokens, the function takes `used` tokens, whose messages have started already. They are not
    returned.
    """
    interval = 1.0 / per_second
    values = _of(key) | {
        "interval": interval,
        "burst": burst,
        "wanted": wanted,
        "used": used,
        "lead": LEAD_SECONDS,
    }
    while (row := run.row(_TAKE_TOKENS, values)) is None:
        # A crash of the server has emptied the unlogged table, or this is the first token of the subscription.
        run.execute(_ADD_BUCKET, _of(key))
    granted, wait_seconds = row
    first = time.monotonic() + wait_seconds
    return [first + number * interval for number in range(used, granted)]


def _of(key: SubscriptionKey) -> dict[str, Any]:
    return {"group_id": key[0], "topic_id": key[1]}


# -- erasing ---------------------------------------------------------------------------------------


# The keys of the messages, if they are to be replaced.
_OLD_KEYS: Final = """(
    SELECT key FROM {schema}.commit_log
    WHERE log_id = ANY(%(log_ids)s::bigint[]) AND %(replacement)s::text IS NOT NULL AND NOT starts_with(key, 'erased:')
)"""
_RELEASE_OLD_KEYS: Final = Statement("DELETE FROM {schema}.slot WHERE topic_id = %(topic_id)s AND key IN " + _OLD_KEYS)
_FORGET_OLD_KEYS: Final = Statement(
    "UPDATE {schema}.slot_demand SET keys = '{{}}' WHERE topic_id = %(topic_id)s AND keys && ARRAY" + _OLD_KEYS
)


def release_keys(run: Executor, values: Mapping[str, Any]) -> int:
    """Delete the slots of these keys. Their instances notice it at the next heartbeat, as after a server's crash."""
    return run.count(_RELEASE_OLD_KEYS, values)


def forget_keys(run: Executor, values: Mapping[str, Any]) -> int:
    """Remove the keys from the demands that contain one of them. Return the number of these demands."""
    return run.count(_FORGET_OLD_KEYS, values)
