"""Up to where a result may speak: watermarks, retention, intervals that are too young, checksums, odd values."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from outbox.broker.database.executor import Executor
from outbox.broker.schema import grants
from outbox.broker.schema.grants import Logins, Role
from spark.common.errors import RunIncomplete, UsageProblem
from spark.common.store import Store
from spark.rules.rule import DatabaseRule, SourceKind
from spark.sources import contract, watermark
from tests.spark.conftest import Reconciler
from tests.spark.world import RULES, START, Order, World

pytestmark = pytest.mark.timeout(300)
HOUR = timedelta(hours=1)


def now() -> datetime:
    return datetime.now(UTC)


@pytest.mark.slow
def test_a_role_that_may_not_see_other_sessions_is_told_so(
    reconcile: Reconciler, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their open transactions would not hold the watermark back. With the grant of the role watch they do."""
    reconcile.rules(groups=())
    world.add(Order(number=1))
    role = f"reader_{os.getpid()}"
    name = sql.Identifier(role)
    made = [sql.Identifier(grants.role_name("outbox", one)) for one in Role]
    world.app.execute(sql.SQL("CREATE ROLE {} LOGIN").format(name))
    try:
        world.app.execute(sql.SQL("GRANT SELECT ON ALL TABLES IN SCHEMA public TO {}").format(name))
        statements = grants.plan(Executor(world.broker, "outbox"), Logins({Role.WATCH: [role]}))
        late = [one for one in statements if "pg_read_all_stats" in one]
        for statement in statements:
            if statement not in late:
                world.broker.execute(statement.encode())
        for variable, url in world.environment.items():
            monkeypatch.setenv(variable, psycopg.conninfo.make_conninfo(url, user=role))
        with psycopg.connect(world.app_url) as slow:
            slow.execute("SELECT 1")
            began = now()
            with pytest.raises(RunIncomplete, match=r"sessions are hidden .* GRANT pg_read_all_stats"):
                reconcile.run()
            for statement in late:
                world.broker.execute(statement.encode())
            result = reconcile.run()
            assert datetime.fromisoformat(result["rules"][0]["watermark"]) <= began
    finally:
        world.broker.execute("REASSIGN OWNED BY outbox_own TO CURRENT_USER")
        for one in (name, *made):
            for connection in (world.app, world.broker):
                connection.execute(sql.SQL("DROP OWNED BY {}").format(one))
            world.app.execute(sql.SQL("DROP ROLE {}").format(one))


def test_what_holds_the_watermark_back() -> None:
    database, at = DatabaseRule(name="app", kind=SourceKind.POSTGRES, location=""), now()
    free = watermark.Activity(at, None, 0, 0, None, False, None, "shop")
    assert watermark.of(database, free) == (at, [])
    complete, [note] = watermark.of(database, replace(free, prepared=at - HOUR))
    assert complete == at - HOUR - watermark.PREPARED_MARGIN
    assert "its start (which is not known" in note
    complete, [note, *_] = watermark.of(database, replace(free, oldest=at - HOUR, appliers=1))
    assert complete == at - HOUR
    assert "logical replication" in note


@pytest.mark.soak
def test_rows_whose_messages_retention_may_have_removed(reconcile: Reconciler, world: World) -> None:
    """A half message is older than its row's time: rows just behind the edge are not judged, those after it are."""
    reconcile.rules(groups=())
    edge = START + HOUR
    world.pay(Order(number=500, at=edge + timedelta(milliseconds=3)))
    world.pay(Order(number=501, at=edge + timedelta(minutes=16)))
    world.add(Order(number=502, at=edge + timedelta(minutes=20)))
    world.broker.execute("UPDATE topic SET retention_seconds = 3600 WHERE name = 'order.paid'")
    statement = "INSERT INTO pruned (topic_id, sent, pruned_at) VALUES (%s, 1, %s)"
    world.broker.execute(statement, [world.topic_id, edge + HOUR])
    result = reconcile.run()
    assert reconcile.findings(result) == [("501", "", "LOST")]
    assert "rows before 2025-06-01T13:15:00+00:00 are not judged" in result["rules"][0]["notes"][0]


@pytest.mark.soak
def test_an_open_finding_whose_evidence_retention_has_removed_is_closed(reconcile: Reconciler, world: World) -> None:
    """A row whose message is gone is neither LOST nor RECOVERED; keys with their messages are judged as before."""
    reconcile.rules(groups=())
    world.add(Order(number=1))
    world.app.execute("UPDATE orders_order SET total = 99")
    edge = START + HOUR
    world.pay(Order(number=50, at=edge + timedelta(minutes=16)))
    assert set(reconcile.findings(reconcile.run())) == {("1", "", "MISMATCH"), ("50", "", "LOST")}
    world.broker.execute("DELETE FROM commit_log")
    world.send(Order(number=2, at=edge + HOUR))
    world.pay(Order(number=2, at=edge + HOUR))
    world.broker.execute("UPDATE topic SET retention_seconds = 3600 WHERE name = 'order.paid'")
    world.broker.execute(
        "INSERT INTO pruned (topic_id, sent, pruned_at) VALUES (%s, 1, %s)", [world.topic_id, edge + HOUR]
    )
    second = reconcile.run()
    assert set(reconcile.findings(second)) == {("1", "", "EXPIRED"), ("50", "", "LOST")}
    closed = next(row for row in reconcile.rows(second) if row["key"] == "1")
    assert closed["detail"].startswith("the subject was MISMATCH. It is from before 2025-06-01T13:15")
    report = (reconcile.folder / "out" / "report.html").read_text()
    assert "Retention: rows from before 2025-06-01 13:15:00 cannot be judged." in report
    assert second["open_subjects"] == 1, "what is closed is not carried further"


@pytest.mark.slow
def test_an_interval_is_published_when_all_of_it_can_be_judged(reconcile: Reconciler, world: World) -> None:
    reconcile.rules(groups=("logistics",))
    since = START
    world.add(Order(number=1), *(Order(number=number, at=START + 3 * HOUR) for number in range(2, 7)))
    result = reconcile.run(since=since, until=since + HOUR)
    assert {name: count for name, count in result["totals"].items() if count} == {"OK": 2}
    assert result["rules"][0]["rows_read"] == 1, "what comes after the interval is not read"
    until = now() - timedelta(minutes=2)
    waiting = Order(number=10, at=until - timedelta(minutes=1))
    world.pay(waiting)
    world.send(waiting)
    with pytest.raises(RunIncomplete, match=r"1 subjects of the interval cannot be judged yet.*Repeat the run after"):
        reconcile.run(since=until - timedelta(minutes=5), until=until)
    world.effect("logistics", 10, waiting.at)
    done = reconcile.run(since=until - timedelta(minutes=5), until=until)
    assert {name: count for name, count in done["totals"].items() if count} == {"OK": 2}


@pytest.mark.soak
def test_exports_of_bytea_and_effects_without_a_watermark(reconcile: Reconciler, world: World, tmp_path: Path) -> None:
    """As COPY writes them; an effect that is newer than the export of effects is not missing from it."""
    world.add(Order(number=1))
    world.add(Order(number=2, at=START + 5 * HOUR))
    folder = tmp_path / "export"
    folder.mkdir()
    with (folder / "message_v1.csv").open("wb") as out, world.broker.cursor() as cursor:
        with cursor.copy("COPY (SELECT * FROM outbox.message_v1) TO STDOUT (FORMAT csv, HEADER)") as rows:
            for row in rows:
                out.write(row)
    effects = tmp_path / "effects"
    effects.mkdir()
    shipments = effects / "shipment.csv"
    shipments.write_text("order_id,created_at\n")
    for view in ("dead_letter_v1", "delivery_v1"):
        (folder / f"{view}.csv").write_text(",".join(contract.VIEWS[view]) + "\n")
    group = '\n[[rule.group]]\nname = "logistics"\ndatabase = "effects"\ntable = "shipment"\nkey = "order_id"\n'
    text = RULES.format(extra="", groups=group + 'time = "created_at"\nwithin = "10m"\n')
    text = text.replace("[broker]\n", f'[database.effects]\nkind = "csv"\npath = "{effects}"\n\n[broker]\n')
    exported = f'kind = "csv"\npath = "{folder}"\n'
    text = text.replace('env = "RECONCILE_BROKER"', f'{exported}watermark = "{(START + 6 * HOUR).isoformat()}"')
    reconcile.rules(text=text)
    with pytest.raises(RunIncomplete, match=r"'effects' has no row with a time.*Write watermark"):
        reconcile.run()
    shipments.write_text(f"order_id,created_at\n1,{(START + timedelta(minutes=2)).isoformat()}\n")
    result = reconcile.run()
    counted = {name: count for name, count in result["totals"].items() if count}
    assert counted == {"OK": 2, "PENDING": 1}, "order 2 is newer than the export"
    (note,) = next(each["notes"] for each in result["snapshots"] if each["database"] == "effects")
    assert note.startswith("no watermark is given, so the run assumes that the files are complete")
    assert "up to the newest time in 'shipment'" in note


@pytest.mark.slow
def test_values_in_unusual_forms_and_outputs_that_fail(
    reconcile: Reconciler, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.add_many(3)
    world.app.execute("ALTER TABLE orders_order ADD day date DEFAULT '2025-06-13', ADD price money DEFAULT 12.50")
    world.broker.execute(
        "UPDATE commit_log SET body = convert_to(replace(convert_from(body, 'UTF8'), '{', "
        '\'{"day": "2025-06-13", "price": 12.50, \'), \'UTF8\')'
    )
    with psycopg.connect(world.app_url, autocommit=True) as connection:
        setting = sql.SQL("ALTER DATABASE {} SET datestyle = 'German, DMY'")
        connection.execute(setting.format(sql.Identifier(connection.info.dbname)))
    text = RULES.format(extra="", groups="") + '\n[[rule.field]]\ncolumn = "day"\ntype = "date"\n'
    reconcile.rules(text=text)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageProblem, match=r"the metrics .* cannot be written"):
        reconcile.run(metrics=tmp_path / "file" / "x.prom")
    write, shown = Store.write, tmp_path / "outbox.prom"

    def fails(store: Store, name: str, content: str) -> None:
        if name == "result.json":
            raise OSError("disk full")
        write(store, name, content)

    with monkeypatch.context() as patched:
        patched.setattr(Store, "write", fails)
        with pytest.raises(UsageProblem, match=r"the result cannot be written: disk full"):
            reconcile.run(metrics=shown)
    assert not shown.exists() and not (reconcile.folder / "out" / "report.html").exists()
    assert reconcile.findings(reconcile.run(metrics=shown)) == []
    assert shown.exists() and (reconcile.folder / "out" / "report.html").exists()
    reconcile.rules(text=text + '\n[[rule.field]]\ncolumn = "price"\ntype = "decimal"\n')
    with pytest.raises(UsageProblem, match="type money, which cannot be compared as decimal"):
        reconcile.run()
    reconcile.rules(text=text)
    world.app.execute("INSERT INTO orders_order VALUES (77, 'x', 1, 'paid', now(), 'infinity')")
    with pytest.raises(UsageProblem, match=r"orders_order\.paid_at is infinite in 1 rows.* key '77'"):
        reconcile.run()
