"""The command that a finding prints works unchanged: Spark's findings about messages that Django published."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import transaction

from outbox.broker.database.executor import Executor
from outbox.broker.operations.audit import count_messages
from outbox.contrib.django import message, publish, publish_messages
from outbox.contrib.django.database.aliases import alias_conninfo
from outbox.contrib.django.engine.broker import flush
from outbox.utils import faults
from tests.django.sessions import broker_connection
from tests.django.shop.models import Effect, Order
from tests.django.support import consume, handle_all
from tests.django.test_repair import park, subscribe

pytestmark = [
    pytest.mark.usefixtures("databases", "no_subscribers", "no_events"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
ROOT = Path(__file__).resolve().parent.parent.parent
RULES = """
version = 1
[database.default]
env = "RECONCILE_DEFAULT"
[database.broker]
env = "RECONCILE_BROKER"
schema = "outbox"
[broker]
database = "broker"
[[rule]]
name = "orders"
database = "default"
table = "shop_order"
key = "number"
time = "'2025-06-01 12:00+00'::timestamptz + id * interval '1 s'"
topic = "orders"
messages = "at_least_one"
grace = "0s"
stuck_after = "0s"
[[rule.group]]
name = "effects"
within = "1h"
"""


WITH_EFFECTS = RULES.replace(
    'within = "1h"',
    """within = "1h"
table = "shop_effect"
key = "number"
time = "'2025-06-01 12:00+00'::timestamptz + id * interval '1 s'"
when = "number <> 'mended'\"""",
)


def findings(folder: Path, text: str = RULES) -> list[dict[str, Any]]:
    """Of a run of the command over the databases of this test."""
    rules = folder / "reconcile.toml"
    rules.write_text(text)
    aliases = {f"RECONCILE_{alias.upper()}": alias_conninfo(alias) for alias in ("default", "broker")}
    variables = {**os.environ, **aliases, "SPARK_LOCAL_IP": "127.0.0.1"}
    options = ["--output", str(folder / "out")]
    command = [sys.executable, "-m", "spark"]
    run = [*command, "run", "--rules", str(rules), *options, "--master", "local[1]"]
    run += ["--conf", "spark.sql.shuffle.partitions=2", "--conf", "spark.sql.codegen.wholeStage=false"]
    done = subprocess.run(run, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    plan = subprocess.run(
        [*command, "plan", "--rules", str(rules), *options], cwd=ROOT, env=variables, capture_output=True, check=True
    )
    (folder / "plan.jsonl").write_bytes(plan.stdout)
    printed = subprocess.run([*command, "findings", *options], cwd=ROOT, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in printed.stdout.splitlines()]


def command_in(remedy: str, name: str) -> list[str]:
    """The arguments of the command `name` that a remedy prints."""
    (printed,) = [text for text in re.findall(r"`python manage.py ([^`]+)`", remedy) if text.startswith(name)]
    return shlex.split(printed)


def test_every_command_of_a_remedy_works_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One world with every kind whose remedy is a command; afterwards a run finds none of them."""
    monkeypatch.setattr("builtins.input", lambda _: "yes")
    subscribe()
    Order.objects.create(number="1")
    publish("orders", {}, key="1", at_once=True)
    consume()
    Effect.objects.create(number="mended")
    for key in ("2", "4", "5", "8", "9", "12"):
        Order.objects.create(number=key)
        publish("orders", {}, key=key, at_once=True)
    faults.arm("producer.before_end=raise")
    try:
        with transaction.atomic():
            for key in ("3", "6"):
                Order.objects.create(number=key)
            publish_messages([message("orders", {}, key=key) for key in ("3", "6")])
        flush(within_seconds=5)
    finally:
        faults.arm("")
    park()
    handle_all()
    Effect.objects.filter(number__in=("2", "12")).delete()
    prompt = Effect.objects.get(number="9")
    prompt.delete()
    late = Effect.objects.create(number="9", pk=10_000)  # Its time is made of its key.
    with broker_connection() as (connection, schema):
        connection.execute(f"UPDATE {schema}.commit_log SET body = body || '}}' WHERE key = '4'")
    Effect.objects.create(number="5")
    Order.objects.filter(number="8").delete()
    Order.objects.create(number="7")

    found = findings(tmp_path, WITH_EFFECTS)
    assert {(each["class"], each["key"]) for each in found} == {
        ("DEAD", "1"), ("UNDELIVERED", "2"), ("UNDELIVERED", "12"), ("UNREADABLE", "4"), ("LATE", "9"),
        ("HALF_STUCK", "3"), ("HALF_STUCK", "6"), ("DUPLICATE", "5"), ("ORPHAN", "8"), ("LOST", "7"),
    }  # fmt: skip
    printed = {line: None for each in found for line in re.findall(r"`python manage.py ([^`]+)`", each["remedy"])}
    # What a plan mends has commands for a plan, which is applied below.
    causes = json.loads((tmp_path / "out" / "result.json").read_text())["causes"]
    by_class = {each["class"]: each["commands"] for each in causes}
    assert [len(by_class[name]) for name in ("UNDELIVERED", "LATE", "UNREADABLE")] == [3, 1, 1]
    for name in ("UNDELIVERED", "LATE", "UNREADABLE", "ORPHAN", "DUPLICATE"):
        printed |= {command.removeprefix("python manage.py "): None for command in by_class[name]}
    names = {tuple(line.split()[:2]) for line in printed}
    for line in printed:
        if line == "outbox_status":
            with contextlib.suppress(SystemExit):  # Its exit code says that something needs attention.
                call_command("outbox_status", stdout=StringIO())
        elif line != "outbox_repair":
            call_command(*shlex.split(line), stdout=StringIO())
    assert names >= {
        ("outbox_dead_letter", "list"), ("outbox_dead_letter", "replay"), ("outbox_group", "offsets"),
        ("outbox_message", "redeliver"), ("outbox_message", "show"), ("outbox_transaction", "decide"),
    }  # fmt: skip
    out = StringIO()
    publisher = "orders=tests.django.repair_publisher.order"
    with contextlib.suppress(SystemExit):  # Its exit code says that the plan has steps that it only reports.
        call_command("outbox_repair", str(tmp_path / "plan.jsonl"), "--apply", "--publisher", publisher, stdout=out)
    assert out.getvalue().count(": done: ") == 1, out.getvalue()
    # What people do by hand.
    with broker_connection() as (connection, schema):
        connection.execute(f"UPDATE {schema}.commit_log SET body = '{{}}' WHERE key = '4'")
    late.delete()
    prompt.save(force_insert=True)
    Order.objects.create(number="8")
    Effect.objects.filter(number="5").latest("pk").delete()
    handle_all()
    assert sorted(Effect.objects.values_list("number", flat=True)) == [
        "1", "12", "2", "3", "4", "5", "6", "7", "8", "9", "mended",
    ]  # fmt: skip
    with broker_connection() as (connection, schema):
        assert count_messages(Executor(connection, schema)).differences() == []
    open_now = [each for each in findings(tmp_path, WITH_EFFECTS) if each["class"] != "RECOVERED"]
    assert open_now == []


COMPARED = """
name = "effects"
within = "1h"
table = "shop_effect"
key = "number"
time = "'2025-06-01 12:00+00'::timestamptz + id * interval '1 s'"
"""
AMOUNT = "CASE WHEN id >= 10000 THEN 2 ELSE 1 END"
WITH_VALUES = RULES.replace('"at_least_one"', '"exactly_one"').replace(
    '[[rule.group]]\nname = "effects"\nwithin = "1h"\n',
    '[[rule.field]]\ncolumn = "1"\nbody = "n"\ntype = "integer"\n[[rule.group]]' + COMPARED,
)


def test_wrong_and_early_effects_are_settled_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The effect is removed, and the printed command lets the handler write it anew."""
    monkeypatch.setattr("builtins.input", lambda _: "yes")
    head, _, rule = WITH_VALUES.partition("[[rule]]")
    one = f'{rule}compare_effect = {{"{AMOUNT}" = "n"}}\n'
    sums = f'{rule}sum_effect = {{"{AMOUNT}" = "n"}}\n'.replace('name = "orders"', 'name = "sums"')
    text = f"{head}[[rule]]{one}[[rule]]{sums}"
    subscribe()
    Effect.objects.create(number="mended")
    for key in ("1", "2", "3"):
        Order.objects.create(number=key)
        publish("orders", {"n": 1}, key=key, at_once=True)
    handle_all()
    Effect.objects.filter(number__in=("1", "2", "mended")).delete()
    Effect.objects.create(number="1", pk=10_000)
    Effect.objects.create(number="2", pk=-500)
    found = findings(tmp_path, text)
    assert {(each["rule"], each["class"], each["key"]) for each in found} == {
        ("orders", "WRONG_EFFECT", "1"), ("sums", "WRONG_SUM", "1"), ("orders", "EARLY", "2"), ("sums", "EARLY", "2"),
    }  # fmt: skip
    Effect.objects.filter(number__in=("1", "2")).delete()
    Effect.objects.create(number="mended")
    printed = {line for each in found for line in re.findall(r"`python manage.py ([^`]+)`", each["remedy"])}
    commands = {tuple(line.split()[:2]) for line in printed}
    assert commands == {("outbox_message", "show"), ("outbox_message", "redeliver")} and len(printed) == 4
    for line in printed:
        call_command(*shlex.split(line), stdout=StringIO())
    handle_all()
    Effect.objects.filter(number="mended").delete()
    assert sorted(Effect.objects.values_list("number", flat=True)) == ["1", "2", "3"]
    assert not Effect.objects.filter(pk__lt=0).exists() and not Effect.objects.filter(pk__gte=10_000).exists()
