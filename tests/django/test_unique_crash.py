"""SIGKILL of a producer between the row of a unique key and COMMIT: the key is free again."""

from __future__ import annotations

import subprocess
from collections import Counter

import pytest
from django.db import transaction

from outbox.contrib.django import publish
from outbox.contrib.unique import Unique
from outbox.contrib.unique.models import UniqueKey
from tests.django.shop.models import Order
from tests.django.test_crash import KILLED, STEPS, UNIQUE_STEP, committed, differences, driver, run, settle

__all__ = ["driver"]

pytestmark = pytest.mark.usefixtures("empty_log")

ATOMIC_STEPS = [UNIQUE_STEP, "producer.after_local_commit"]
TWO_PHASE_STEPS = [UNIQUE_STEP, *(step for step in STEPS if step != "producer.before_local_commit")]


def keys() -> Counter[str]:
    return Counter(UniqueKey.objects.values_list("unique_key", flat=True))


def test_a_key_is_held_if_and_only_if_its_transaction_committed(path: str, driver: subprocess.Popen[str]) -> None:
    steps = ATOMIC_STEPS if path == "atomic" else TWO_PHASE_STEPS
    for step in steps:
        for visit in (1, 2, 3):
            prefix = f"{step.partition('.')[2]}-{visit}"
            assert run(driver, prefix, "unique", f"{step}=kill@{visit}") == KILLED
    settle()
    assert differences() == Counter()
    orders = Counter({number: 1 for number in committed() if not number.startswith("parent")})
    assert keys() == orders
    # The first visit is the first transaction of the process. It was killed before COMMIT, and its key is free.
    with transaction.atomic():
        assert publish("orders", {}, Unique("after_options-1-c0", within=60), key="again").duplicate_of is None
        Order.objects.create(number="again")
