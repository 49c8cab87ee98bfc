"""The core names no part, and each folder of `outbox/contrib/` is one."""

from __future__ import annotations

import re

from outbox import hooks
from tests.house import parts


def test_the_core_names_no_part() -> None:
    assert parts.mentions(parts.texts()) == {}, "the core names a part: let the part join by a hook (outbox/hooks.py)"


def test_every_folder_of_contrib_is_a_part() -> None:
    folders = {f"contrib/{one.parent.name}/" for one in parts.ROOT.glob("outbox/contrib/*/__init__.py")}
    assert folders - {"contrib/django/"} <= {path for part in parts.PARTS for path in part.paths}


def test_the_index_of_the_hooks_names_each_one() -> None:
    index = (hooks.__doc__ or "").split("Code is named by", 1)[0]
    assert {name for name in vars(hooks) if name.startswith("add_")} == set(re.findall(r"\badd_\w+", index))


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
    ("contrib/django/worker/page.html", "<a href=\"{% url 'outbox:sinks' %}\">Sinks</a>\n", "forwarding"),
]


def test_a_planted_mention_is_found() -> None:
    texts = dict(parts.texts())
    for file, line, part in PLANTED:
        # The template is a new file.
        text = texts.get(file, "")
        assert parts.mentions([(file, text + line)]) == {(part, file): [line.rstrip().lower()]}
