"""The action that erases the content of messages everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from outbox.contrib.django.actions.declaration import (
    ActionPlan,
    Button,
    Field,
    FieldKind,
    Values,
    action,
    argument,
    counted,
)
from outbox.contrib.django.settings.conf import settings_of
from outbox.contrib.erasure.erasing import Erased, ErasureRequest, erase
from outbox.contrib.erasure.settings import ErasureSettings

# The audit names at most this many messages.
_NOTED: Final = 100
_CAUTION: Final = (
    "This cannot be undone. A consumer process that has fetched a message may still handle it with its content: "
    "restart the workers, then repeat this action. Backups and WAL keep the content until they expire."
)


def _button(page: Mapping[str, Any]) -> Sequence[Button]:
    message = page["message"]
    return [Button("Erase …", "bad", {"topic": message.topic, "message": message.message_id})]


@action(
    "erase",
    "Erase personal data",
    "outbox_erase",
    argument("topic", "topic of the messages"),
    Field("key", "erase all messages of the topic with this key"),
    Field("message", "erase this message", FieldKind.ID, many=True, label="Message ids"),
    Field("with_key", "replace the key too, everywhere", FieldKind.FLAG, label="The key is personal"),
    Field(
        "text",
        "also erase this text (a name, an address) from errors, findings, notifications and the audit",
        many=True,
        label="Personal texts",
    ),
    buttons={"message": _button},
)
def _erase(values: Values) -> ActionPlan:
    request = ErasureRequest(
        topic=values["topic"],
        key=values["key"],
        message_ids=tuple(dict.fromkeys(values["message"])),
        with_key=values["with_key"],
        texts=tuple(values["text"]),
    )
    planned = erase(request, reason="", dry_run=True)
    settings = settings_of(ErasureSettings)
    recorded = request.key is not None and settings.erasure_list is not None
    # The plan is stored in the audit, so it does not contain the key or the texts.
    once = (
        " OUTBOX['ERASURE_SECRET'] is not set: if you repeat this action, it does not find these messages by their key."
        if request.with_key and settings.erasure_secret is None
        else ""
    )
    listed = "" if settings.erasure_list else " OUTBOX['ERASURE_LIST'] is not set: after a restore, erase again."
    kept = (
        "" if request.key is None or request.with_key else " The key itself stays: if it is personal, add --with-key."
    )
    return ActionPlan(
        subject=f"messages of topic {request.topic}",
        effect=f"Erase the content of {counted(len(planned.message_ids), 'message')} of topic {request.topic}, and "
        "what is stored about it. Ids, tags and times of messages stay. Waiting messages are recalled.",
        caution=f"{_CAUTION}{kept}{once}{listed}",
        dangerous=True,
        before=_counted(planned),
        nothing=not planned.rows and not recorded,
        do=lambda: _counted(erase(request, reason="", dry_run=False)),
        do_because=lambda why: _counted(erase(request, reason=why, dry_run=False)),
    )


def _counted(erased: Erased) -> Mapping[str, Any]:
    ids = [str(one) for one in erased.message_ids]
    return {
        "rows": dict(sorted(erased.rows.items())),
        "messages": len(ids),
        "message_ids": ids[:_NOTED],
        **({"not_listed": len(ids) - _NOTED} if len(ids) > _NOTED else {}),
    }
