"""The calls of docs/migration.md for Celery, in the project of docs/celery.md."""

from __future__ import annotations

import json
import re

import pytest

from tests.celery.project import ROOT, Project

# What went to Celery's broker after a rollback, and after a commit and its hand-over.
PAID = """
import json
from django.db import transaction
from outbox.contrib.django.worker.drain import drain
from shop.celery import app
from shop.services import pay

def sent():
    with app.connection_for_read() as connection:
        found = []
        while (message := connection.default_channel.basic_get("celery", no_ack=True)) is not None:
            found.append(message.headers["task"])
        return found

try:
    with transaction.atomic():
        pay("A-1")
        raise RuntimeError
except RuntimeError:
    drain()
undone = sent()
pay("A-2")
drain()
print(json.dumps([undone, sent()]))
"""


@pytest.mark.parametrize("guide", ["From Celery", "From django-celery-outbox"])
def test_the_calls_of_a_guide_join_their_transaction(shop: Project, guide: str) -> None:
    page = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    text = page.split(f"\n## {guide}\n", 1)[1].split("\n## ", 1)[0]
    files = re.findall(r"^```python\n# (shop/\w+\.py)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in files] == ["shop/services.py"]
    for name, code in files:
        (shop.folder / name).write_text(code)
    assert json.loads(shop.python(PAID)) == [[], ["shop.tasks.send_invoice"]]
