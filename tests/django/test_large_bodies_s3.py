"""Large bodies in a bucket, by django-storages and a local S3 server."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.core.files.storage import storages
from django.db import transaction
from django.test.utils import override_settings

from outbox.contrib.django import message, publish, subscriber
from outbox.contrib.large_bodies.objects import name_of
from outbox.contrib.large_bodies.orphans import remove_orphans
from outbox.message import Delivery
from tests.django.large_storage import DECLARED, LATER
from tests.django.support import consume
from tests.spark.object_store import BUCKET, running

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("databases", "no_subscribers")]


def test_bodies_in_a_bucket(tmp_path: Path, outbox_settings: Callable[..., None]) -> None:
    seen: list[Any] = []

    @subscriber("orders", group="reading")
    def reading(delivery: Delivery) -> None:
        with delivery.open_body() as file:
            seen.append((delivery.body, len(file.read())))

    body = {"text": "x" * 300_000}
    with running(tmp_path) as server:
        options = {
            "bucket_name": BUCKET,
            "endpoint_url": server["AWS_ENDPOINT_URL"],
            "access_key": server["AWS_ACCESS_KEY_ID"],
            "secret_key": server["AWS_SECRET_ACCESS_KEY"],
            "region_name": server["AWS_REGION"],
            "location": "shop",
            # A body is read through a temporary file if it is larger than this.
            "max_memory_size": 64 * 1024,
        }
        outbox_settings(LARGE_BODIES=DECLARED)
        backend = {"BACKEND": "storages.backends.s3.S3Storage", "OPTIONS": options}
        with override_settings(STORAGES={**django_settings.STORAGES, "large": backend}):
            with transaction.atomic():
                kept = publish("orders", body).message_id
            orphan = message("orders", body).message_id
            lost = publish("orders", body, at_once=True).message_id
            bucket = storages["large"]
            bucket.delete(name_of(lost))
            counts = consume()
            assert seen == [(body, 300_011)]
            assert (counts.handled, counts.failed) == (1, 1), "the object of the other message is gone"
            remove_orphans()
            assert remove_orphans(now=datetime.now(UTC) + LATER).removed == 1
            assert (bucket.exists(name_of(kept)), bucket.exists(name_of(orphan))) == (True, False)
