"""The actions on subjects' keys, for test_actions.py."""

from __future__ import annotations

import base64
from typing import Final

from outbox.contrib.encryption.keys import create_key_table, subject_keys
from outbox.contrib.encryption.models import SubjectKey
from tests.django.broker_world import World
from tests.django.test_actions import Given, case

KEKS: Final = [base64.b64encode(bytes([number]) * 32).decode() for number in (1, 2)]


def subject_key(world: World) -> None:
    create_key_table("default")
    SubjectKey.objects.all().delete()
    world.change_settings(KEY_DATABASE="default", KEY_ENCRYPTION_KEYS=[KEKS[0]])
    subject_keys().key_for("anna")


@case("delete_subject_key", lambda world: list(SubjectKey.objects.values_list("subject", "wrapped")))
def _delete_subject_key(world: World) -> Given:
    subject_key(world)
    return {"subject": "anna"}


@case("rotate_subject_keys", lambda world: [bytes(one.wrapped or b"")[1:9] for one in SubjectKey.objects.all()])
def _rotate_subject_keys(world: World) -> Given:
    subject_key(world)
    world.change_settings(KEY_ENCRYPTION_KEYS=[KEKS[1], KEKS[0]])
    return {}
