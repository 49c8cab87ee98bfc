"""Actions on the keys of subjects."""

from __future__ import annotations

from uuid import UUID

from outbox.contrib.django.actions.declaration import ActionPlan, Field, FieldKind, Values, action
from outbox.contrib.encryption.keys import delete_for, lists_of_deleted_keys, subject_keys
from outbox.errors import UsageError


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
    listed = "" if lists_of_deleted_keys() else " OUTBOX['ERASURE_LIST'] is not set: after a restore of the key "
    listed += "" if lists_of_deleted_keys() else "database, delete the key again."
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
        do=lambda: delete_for(found, reason=""),
        do_because=lambda why: delete_for(found, reason=why),
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
