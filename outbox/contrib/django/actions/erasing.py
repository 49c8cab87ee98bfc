"""Actions on personal data: erase the content of messages everywhere, and delete the key of a subject."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

from outbox.contrib.django.actions.declaration import ActionPlan, Field, FieldKind, Values, action, argument, counted
from outbox.contrib.django.database.subject_keys import subject_keys
from outbox.contrib.django.operations.erasing import Erased, ErasureRequest, delete_key, erase
from outbox.contrib.django.settings.conf import get_settings
from outbox.errors import UsageError

# The audit names at most this many messages.
_NOTED: Final = 100
_CAUTION: Final = (
    "This cannot be undone. A consumer process that has fetched a message may still handle it with its content: "
    "restart the workers, then repeat this action. Backups and WAL keep the content until they expire."
)


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
    settings = get_settings()
    recorded = request.key is not None and settings.erasure_list is not None
    # The plan is stored in the audit, so it does not contain the key or the texts.
    listed = "" if settings.erasure_list else " OUTBOX['ERASURE_LIST'] is not set: after a restore, erase again."
    kept = (
        "" if request.key is None or request.with_key else " The key itself stays: if it is personal, add --with-key."
    )
    return ActionPlan(
        subject=f"messages of topic {request.topic}",
        effect=f"Erase the content of {counted(len(planned.message_ids), 'message')} of topic {request.topic}, and "
        "what is stored about it. Ids, tags and times of messages stay. Waiting messages are recalled.",
        caution=f"{_CAUTION}{kept}{listed}",
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


# -- keys of subjects -----------------------------------------------------------------------------------


@action(
    "delete_subject_key",
    "Delete the key of a subject",
    "outbox_subject_key delete",
    Field("subject", "the subject, as it was passed to publish", positional=True),
    Field("key_id", "the id of the key, instead of the subject", FieldKind.ID),
    permission=None,
)
def _delete_key(values: Values) -> ActionPlan:
    keys, subject, key_id = subject_keys(), values["subject"], values["key_id"]
    if (subject is None) == (key_id is None):
        raise UsageError("give either the subject or --key-id.")
    found: UUID | None = key_id or keys.id_of(subject)
    if found is None:
        raise UsageError(
            "the subject has no key: no message was encrypted for it, or its key was deleted before. Subjects are "
            "compared letter by letter."
        )
    listed = "" if get_settings().erasure_list else " OUTBOX['ERASURE_LIST'] is not set: after a restore of the key "
    listed += "" if get_settings().erasure_list else "database, delete the key again."
    deleted = found in keys.deleted()
    # The plan is stored in the audit, so it does not contain the subject.
    return ActionPlan(
        subject=f"key {found} of a subject",
        effect=f"Delete the key {found} of a subject. No copy of a body that was encrypted with it can be read any "
        "more: in the log, archives, backups and forwarded copies. Handlers see delivery.erased.",
        caution=f"This cannot be undone. Other processes use the key for up to a minute.{listed}",
        dangerous=True,
        before={"deleted": deleted},
        nothing=deleted,
        do=lambda: delete_key(found, reason=""),
        do_because=lambda why: delete_key(found, reason=why),
    )


@action(
    "rotate_subject_keys",
    "Encrypt the keys of subjects with the newest key-encrypting key",
    "outbox_subject_key rotate",
    permission=None,
)
def _rotate(values: Values) -> ActionPlan:
    count = subject_keys().rotate(dry_run=True)
    return ActionPlan(
        subject="keys of subjects",
        effect=f"Encrypt the keys of {count} subjects with the first of OUTBOX['KEY_ENCRYPTION_KEYS']. Bodies stay as "
        "they are. Afterwards the other key-encrypting keys can be removed from the settings.",
        before={"not_current": count},
        nothing=count == 0,
        do=lambda: {"changed": subject_keys().rotate(dry_run=False)},
    )
