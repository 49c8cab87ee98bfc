"""The action that edits dead letters, and the list of the edits with the content before each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.operations.dead_letters import LetterSelection, replay
from outbox.contrib.django.actions.cells import group_link, message_link
from outbox.contrib.django.actions.declaration import (
    LEFT,
    ActionPlan,
    Field,
    FieldKind,
    ListForm,
    Values,
    action,
    counted,
)
from outbox.contrib.django.actions.listing import COMMAND, Asked, Column, Listing
from outbox.contrib.django.actions.messages import SETTLING, pinned_selection, settle_selected
from outbox.contrib.django.engine.broker import get_broker, get_codecs
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.subscribers.registry import autodiscover
from outbox.contrib.editing.letters import NONE, Letter, Outcome, edit, edited, readable
from outbox.errors import UsageError
from outbox.message import Message
from outbox.utils.faults import point
from outbox.utils.safe_text import class_name, masked_names, masked_value, show_as

# The audit names at most this many messages.
_NOTED: Final = 100
# Every edited body is read and written, so one action edits fewer letters than it would replay.
_SELECTED: Final = (*SETTLING[:-1], replace(SETTLING[-1], default=1_000))


@action(
    "edit",
    "Edit the content of dead letters",
    "outbox_dead_letter edit",
    *_SELECTED,
    Field("patch", "a JSON merge patch of the body; null removes a field", example='{"amount": 5, "note": null}'),
    Field("body", "the new body as JSON, in place of a patch", label="New body"),
    Field("headers", "a JSON merge patch of the headers", label="Patch of the headers"),
    Field("replay", "also deliver the edited letters again", FieldKind.FLAG, label="Also replay them"),
    Field("digest", "only if the plan has this digest, which --dry-run shows", label="Digest of the plan"),
    form=ListForm("edited", "Edit dead letters", "Edit …", left_empty=("digest", "until")),
    shows_bodies=True,
)
def _edit(values: Values) -> ActionPlan:
    body, patch, headers = (_json(values, name) for name in ("body", "patch", "headers"))
    if (body is NONE) == (patch is NONE) and (body is not NONE or headers is NONE):
        raise UsageError("give --patch or --body, or --headers alone or with one of them.")
    group, codecs = values["group"], get_codecs()
    its = [one.subscription for one in autodiscover() if one.subscription.group == group]
    readers = {one.topic: one.decoder(codecs.decode) for one in its}

    def changed(letter: Letter) -> Message:
        message = edited(letter, codecs, body=body, patch=patch, headers=headers)
        try:
            if letter.topic in readers:
                # The types and upcasters of the handler refuse a body that it could not read.
                readers[letter.topic](message)
        except Exception as error:
            if _masked(letter.topic):
                # Its text may have the value of a masked field.
                show_as(error, class_name(error))
            raise
        return message

    selection, which = pinned_selection(values)

    def once(digest: str | None, *, dry_run: bool) -> Outcome:
        outcomes = []

        def settle(run: Executor, _: str, selection: LetterSelection, *, limit: int) -> int:
            outcomes.append(edit(run, group, selection, changed, masked=_masked, limit=limit))
            if digest not in (None, outcomes[0].digest):
                raise UsageError(
                    f"nothing was edited: the dead letters of group {group!r} have changed since this plan was made. "
                    "Repeat the action to see the new plan."
                )
            if values["replay"]:
                replay(run, group, LetterSelection(message_ids=outcomes[0].changed), limit=limit)
            return outcomes[0].selected

        settle_selected(settle, "edited", group, selection, limit=values["limit"], dry_run=dry_run)
        return outcomes[0]

    planned = once(values["digest"], dry_run=True)

    def do() -> Mapping[str, Any]:
        outcome = once(planned.digest, dry_run=False)
        point("editing.after_commit")
        get_broker().notify_decided()
        return _facts(outcome)

    letters, ids = counted(len(planned.changed), "dead letter"), planned.changed
    again = ", and deliver them again" if values["replay"] else ""
    more = f" One action takes at most {selected} letters." if (selected := planned.selected) == values["limit"] else ""
    others = (
        " A message has one content for all groups, so these groups, too, get the new one: "
        f"{', '.join(planned.groups)}."
        if planned.groups
        else ""
    )
    return ActionPlan(
        subject=f"messages {ids[0]}" if len(ids) == 1 else f"dead letters of group {group}",
        effect=f"Edit {letters} of group {group}{which}{again}.{more}{others}",
        # The audit does not store the caution, so only here are contents.
        caution="\n".join([*planned.shown, f"Digest: {planned.digest}"]),
        dangerous=True,
        before=_facts(planned),
        pinned={"until": str(selection.until), "digest": planned.digest},
        nothing=not ids,
        do=do,
    )


def _json(values: Values, name: str) -> Any:
    try:
        found = NONE if values[name] is None else json.loads(values[name])
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--{name} is not JSON: {error}.") from None
    if name != "body" and not isinstance(found, dict) and found is not NONE:
        raise UsageError(f'--{name} is not a JSON object, such as {{"name": "value"}}.')
    return found


def _masked(topic: str) -> frozenset[str]:
    return masked_names(get_settings().masked_fields, topic)


def _facts(outcome: Outcome) -> dict[str, Any]:
    ids = list(map(str, outcome.changed))
    left = [f"{one} ({reason})" for one, reason in outcome.left.items()]
    return {"edited": len(ids), "messages": ids[:_NOTED], "left": len(left)} | ({LEFT: left[:_NOTED]} if left else {})


# -- the contents before the edits ----------------------------------------------------------------------

_EDITS: Final = Statement("""
SELECT edit_id, edited_at, consumer_group.name AS "group", topic.name AS topic, message_id, edit.content_type,
       coalesce(edit.headers, '{{}}') AS headers, edit.body
FROM {schema}.edited_letter edit
JOIN {schema}.consumer_group USING (group_id)
JOIN {schema}.commit_log USING (log_id)
JOIN {schema}.topic USING (topic_id)
WHERE (%(group)s::text IS NULL OR consumer_group.name = %(group)s)
  AND (%(after)s::bigint IS NULL OR edit_id < %(after)s)
ORDER BY edit_id DESC LIMIT %(limit)s
""")


def _read(run: Executor, asked: Asked) -> Sequence[dict[str, Any]]:
    found: list[dict[str, Any]] = run.objects(dict, _EDITS, {**asked.only("group", "after"), "limit": asked.limit})
    for one in found:
        masked = _masked(one["topic"])
        one |= {"headers": masked_value(one["headers"], masked), "body": readable(one["body"], masked)}
    return found


EDITED: Final = Listing(
    "edited",
    (
        Column("Edited", "edited_at"),
        Column("Group", lambda one: group_link(one["group"])),
        Column("Topic", "topic"),
        Column("Message", lambda one: message_link(one["message_id"])),
        Column("Body before", lambda one: json.dumps(one["body"], ensure_ascii=False)[:60], on=COMMAND),
    ),
    _read,
    command="outbox_dead_letter edited",
    help="list the edits of dead letters with the content before each, which --json shows whole",
    fields=(Field("group", "only dead letters of this group", positional=True),),
    after=Field("after", "show the edits before the one with this number", FieldKind.NUMBER),
    position=lambda one: one["edit_id"],
    address="dead-letters/edited/",
    title="Edited dead letters",
    menu=("Repair", "Edit dead letters"),
    caption="Edits of dead letters, newest first",
    empty="No dead letter was edited.",
)
