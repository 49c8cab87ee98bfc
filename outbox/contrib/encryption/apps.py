"""The Django application of encryption per subject."""

from __future__ import annotations

from django.apps import AppConfig
from django.db.models.signals import post_migrate

from outbox import hooks
from outbox.contrib.encryption.settings import ENCRYPTED_CONTENT_TYPE, EncryptionSettings
from outbox.hooks import BodyForm, DeletedKeys, when_called

hooks.add_settings(EncryptionSettings)
hooks.add_own_database("outbox.contrib.encryption.keys.alias_of_settings")


class OutboxEncryptionConfig(AppConfig):
    """Encryption per subject. To use it, add 'outbox.contrib.encryption' to INSTALLED_APPS."""

    name = "outbox.contrib.encryption"
    label = "outbox_encryption"
    verbose_name = "Outbox encryption"

    def ready(self) -> None:
        """Join the core: the form of encrypted bodies, the actions on keys, and the table of keys."""
        hooks.add_body_form(
            ENCRYPTED_CONTENT_TYPE,
            BodyForm(
                codec="outbox.contrib.encryption.keys.EncryptedCodec", shown="outbox.contrib.encryption.keys.shown"
            ),
        )
        hooks.add_actions("outbox.contrib.encryption.actions")
        hooks.add_tables(self.label, content={"SubjectKey": None})
        hooks.add_deleted_keys(
            "outbox_subject_key",
            DeletedKeys(
                deleted="outbox.contrib.encryption.keys.deleted_keys",
                delete="outbox.contrib.encryption.keys.delete_key",
            ),
        )
        after_migrate = when_called("outbox.contrib.encryption.keys.after_migrate")
        # Only the signal refers to this function, so the reference must be strong.
        post_migrate.connect(after_migrate, sender=self, weak=False, dispatch_uid="outbox.encryption.after_migrate")
