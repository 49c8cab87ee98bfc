"""Edit dead letters.

An edit changes the message in the log and keeps its id and its place. So the inbox knows the message, its key keeps its
order, and its effect happens once. `edited_letter` keeps the content before each edit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

from outbox.broker.database.arrays import bigints, dump_headers
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.groups.registration import group_id_of
from outbox.broker.operations.dead_letters import LetterSelection, lock
from outbox.broker.operations.trace import Whereabouts, whereabouts
from outbox.codec import OWN_CONTENT_TYPES, Codecs, JsonCodec
from outbox.erased import ERASED_CONTENT_TYPE
from outbox.errors import OutboxError
from outbox.message import Message
from outbox.utils.faults import point
from outbox.utils.safe_text import MASK, class_name, inert, masked_value, shown_text

# The value of a field, or a new body, that is not given.
NONE: Final[Any] = object()
# So many bodies are in memory at a time. So many letters, and characters of a value, are shown.
_AT_A_TIME, _SHOWN, _CHARACTERS = 50, 5, 80

_READ: Final = Statement("""
SELECT log_id, message_id, topic.name AS topic, key, tag, content_type, coalesce(headers, '{{}}') AS headers, body
FROM {schema}.commit_log log JOIN {schema}.topic USING (topic_id)
WHERE log_id = ANY(%(log_ids)s::bigint[]) ORDER BY log_id
FOR UPDATE OF log
""")
_KEEP: Final = Statement("""
INSERT INTO {schema}.edited_letter (group_id, log_id, content_type, headers, body)
SELECT %(group_id)s, log_id, content_type, headers, body FROM {schema}.commit_log WHERE log_id = %(log_id)s
""")
_CHANGE: Final = Statement("""
UPDATE {schema}.commit_log SET content_type = %(content_type)s, headers = %(headers)s::text::jsonb, body = %(body)s
WHERE log_id = %(log_id)s
""")
_GROUPS: Final = Statement("""
SELECT consumer_group.name
FROM {schema}.topic JOIN {schema}.subscription USING (topic_id) JOIN {schema}.consumer_group USING (group_id)
WHERE topic.name = %(topic)s AND NOT broadcast ORDER BY 1
""")
# An edit holds these locks, so the next statement sees what it has kept.
_WAIT_FOR_EDITS: Final = Statement("""
SELECT FROM {schema}.dead_letter WHERE log_id = ANY(%(log_ids)s::bigint[]) ORDER BY log_id, group_id FOR UPDATE
""")
_ERASE: Final = Statement("""
UPDATE {schema}.edited_letter SET body = '', headers = NULL, content_type = %(erased)s
WHERE log_id = ANY(%(log_ids)s::bigint[]) AND content_type <> %(erased)s
""")


class LeftAsItIs(OutboxError):
    """The letter cannot be edited. The text is stored in the audit, so it has nothing of the content."""


@dataclass(frozen=True, slots=True)
class Letter:
    """A locked dead letter. `headers` is a dict, unless another program has stored the message."""

    log_id: int
    message_id: UUID
    topic: str
    key: str
    tag: str
    content_type: str
    headers: Any
    body: bytes

    def message(self, **changed: Any) -> Message:
        """Return the message of this letter with other values. Raises InvalidName or InvalidMessage."""
        names = ("message_id", "topic", "key", "tag", "content_type", "headers", "body")
        return Message(**{**{name: getattr(self, name) for name in names}, **changed})


def edited(letter: Letter, codecs: Codecs, *, body: Any = NONE, patch: Any = NONE, headers: Any = NONE) -> Message:
    """Return a letter with a new body, or with JSON merge patches (RFC 7386) of its body and headers.

    Raises LeftAsItIs, and the errors of codecs and of new messages.
    """
    encoded, content_type = letter.body, letter.content_type
    if body is not NONE:
        encoded, content_type = codecs.encode(letter.topic, body)
    elif patch is not NONE:
        value = codecs.decode(content_type, encoded)
        if not isinstance(value, dict):
            raise LeftAsItIs("its body is not an object, so it has no fields")
        again, content_type = codecs.encode(letter.topic, value)
        if content_type != letter.content_type:
            raise LeftAsItIs("the codec of its topic writes another content type")
        if content_type == JsonCodec.content_type and _exact(again) != _exact(encoded):
            raise LeftAsItIs("a number in its body would lose digits")
        encoded, _ = codecs.encode(letter.topic, merged(value, patch))
    merged_headers = letter.headers if headers is NONE else merged(letter.headers, headers)
    if (content_type, merged_headers, encoded) == (letter.content_type, letter.headers, letter.body):
        raise LeftAsItIs("it has this content already")
    return letter.message(content_type=content_type, headers=merged_headers, body=encoded)


@dataclass(slots=True)
class Outcome:
    """What an edit does.

    `changed`: the ids of the letters. `left`: why others stay as they are. `shown`: the differences and errors of the
    first letters. `groups`: the other groups that get the content. `digest`: a hash of the content before and after.
    """

    selected: int = 0
    changed: list[UUID] = field(default_factory=list)
    left: dict[UUID, str] = field(default_factory=dict)
    shown: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    digest: str = ""


def edit(
    run: Executor,
    group: str,
    selection: LetterSelection,
    changed: Callable[[Letter], Message],
    *,
    masked: Callable[[str], Collection[str]],
    limit: int,
) -> Outcome:
    """Edit dead letters of a group in the open transaction. Raises UnknownGroup.

    If `changed` raises an error, the letter stays as it is. `masked` returns the fields of a topic that are not shown.
    """
    group_id = group_id_of(run, group)
    log_ids, by_topic = lock(run, group, selection, limit=limit), dict[str, list[UUID]]()
    outcome, digest = Outcome(selected=len(log_ids)), hashlib.sha256()
    for letter in _read(run, log_ids):
        try:
            if letter.content_type.startswith(OWN_CONTENT_TYPES):
                raise LeftAsItIs("its body is erased, encrypted or stored elsewhere")
            if not isinstance(letter.headers, dict):
                raise LeftAsItIs("its headers are damaged")
            message = changed(letter)
        except LeftAsItIs as error:
            outcome.left[letter.message_id] = str(error)
            shown = f"left as it is: {error}"
        except Exception as error:
            # The errors of the application's codecs and types may show content, which must not be in the audit.
            outcome.left[letter.message_id] = class_name(error)
            shown = f"left as it is: {shown_text(error)}"
        else:
            _store(run, group_id, letter, message)
            shown = "; ".join(differences(letter, message, masked(letter.topic)))
            outcome.changed.append(letter.message_id)
            by_topic.setdefault(letter.topic, []).append(letter.message_id)
            digest.update(repr((letter, message.content_type, message.headers, message.body)).encode())
        if len(outcome.shown) < _SHOWN:
            outcome.shown.append(f"{letter.message_id}: {shown}")
    outcome.digest = digest.hexdigest()[:16]
    for topic, ids in by_topic.items():
        for [other] in run.rows(_GROUPS, {"topic": topic}):
            unfinished = {Whereabouts.WAITING, Whereabouts.DEAD} & {*whereabouts(run, other, ids).values()}
            if other != group and unfinished and other not in outcome.groups:
                outcome.groups.append(other)
    return outcome


def _store(run: Executor, group_id: int, letter: Letter, message: Message) -> None:
    run.execute(_KEEP, {"group_id": group_id, "log_id": letter.log_id})
    point("editing.after_original")
    headers = dump_headers(message.headers) if message.headers else None
    content = {"content_type": message.content_type, "headers": headers, "body": message.body}
    run.execute(_CHANGE, {**content, "log_id": letter.log_id})
    point("editing.after_change")


def _read(run: Executor, log_ids: Sequence[int]) -> Iterator[Letter]:
    for first in range(0, len(log_ids), _AT_A_TIME):
        yield from run.objects(Letter, _READ, {"log_ids": bigints(log_ids[first : first + _AT_A_TIME])})


def erase(run: Executor, values: Mapping[str, Any]) -> int:
    """Erase the content before the edits of these messages. Return the number of changed rows."""
    run.execute(_WAIT_FOR_EDITS, values)
    return run.count(_ERASE, {**values, "erased": ERASED_CONTENT_TYPE})


def merged(value: Any, patch: Any) -> Any:
    """Return the value with a JSON merge patch applied: null removes a field, an object changes one in turn."""
    if not isinstance(patch, Mapping):
        return patch
    found = dict(value) if isinstance(value, dict) else {}
    for name, one in patch.items():
        if one is None:
            found.pop(name, None)
        else:
            found[name] = merged(found.get(name), one)
    return found


def _exact(body: bytes) -> Any:
    return json.loads(body, parse_float=Decimal)


def readable(body: bytes, masked: Collection[str]) -> Any:
    """Return the value of a JSON body without masked fields, or the text of another body if no field is masked."""
    try:
        return masked_value(json.loads(body), masked)
    except (ValueError, RecursionError):
        return MASK if masked else body.decode(errors="replace")


def differences(letter: Letter, message: Message, masked: Collection[str]) -> Iterator[str]:
    """Yield each field that an edit changes, with its old and new value."""
    body = _changed("body", readable(letter.body, masked), readable(message.body, masked))
    headers = _changed("headers", masked_value(letter.headers, masked), masked_value(message.headers, masked))
    try:
        yield from [*body, *headers] or ["masked or invisible content"]
    except RecursionError:
        yield "a body that is too deep to be shown"


def _changed(path: str, old: Any, new: Any) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in {**old, **new}:
            yield from _changed(f"{path}.{name}", old.get(name, NONE), new.get(name, NONE))
    elif repr(old) != repr(new):
        before, after = ("nothing" if one is NONE else inert(repr(one))[:_CHARACTERS] for one in (old, new))
        yield f"{inert(path)}: {before} → {after}"
