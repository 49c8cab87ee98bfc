"""The core names no part: the lines that still do are counted, and the numbers only fall."""

from __future__ import annotations

from tests.house import parts


def test_the_core_names_no_part_more_often_than_allowed() -> None:
    now, before = parts.mentions(parts.texts()), parts.allowed()
    more = {one: (before.get(one, 0), count) for one, count in now.items() if count > before.get(one, 0)}
    assert not more, "the core names a part: let the part join by a hook"
    assert parts.lowered(now, before) == parts.ALLOWED.read_text(encoding="utf-8"), (
        "fewer lines name a part: run `python -m tests.house.parts`"
    )


def test_every_part_has_files() -> None:
    for part in parts.PARTS:
        for path in part.paths:
            assert (parts.ROOT / "outbox" / path).exists(), f"{part.name}: {path}"
        for path in part.tests:
            assert (parts.ROOT / "tests" / path).exists(), f"{part.name}: {path}"


# Imports, tables in SQL and in code, a header, and addresses in a template.
PLANTED = [
    ("broker/leading.py", "from outbox.contrib.schedules.cron import Cron\n", "schedules"),
    ("broker/schema/current.sql", "SELECT count(*) FROM {schema}.slot_demand;\n", "limits"),
    ("contrib/django/ledger/ledger.py", "_ROWS = 'SELECT 1 FROM outbox_erased'\n", "erasure"),
    ("subscription.py", "from outbox.events.declaration import find_event\n", "events"),
    ("__init__.py", "from outbox import events\n", "events"),
    ("broker/schema/current.sql", "SELECT error FROM unknown_version;\n", "events"),
    ("broker/operations/broker_conditions.py", "def unknown_versions(run: Executor) -> None: ...\n", "events"),
    ("contrib/django/worker/page.html", "<a href=\"{% url 'outbox:event' %}\">Events</a>\n", "events"),
    ("contrib/django/publishing/publish.py", 'VERSION = "outbox-event-version"\n', "events"),
    ("contrib/django/worker/page.html", "<a href=\"{% url 'outbox:endpoints' %}\">Endpoints</a>\n", "forwarding"),
]


def test_a_planted_mention_is_found() -> None:
    texts = dict(parts.texts())
    for file, line, part in PLANTED:
        # The template is a new file.
        text = texts.get(file, "")
        before, now = parts.mentions([(file, text)]), parts.mentions([(file, text + line)])
        assert {one: count for one, count in now.items() if count != before.get(one)} == {
            (part, file): before.get((part, file), 0) + 1
        }
        # A count that has risen is not written.
        assert parts.lowered(now, before) == parts.lowered(before, before)
