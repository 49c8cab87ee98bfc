"""The rules file: its values, and errors that name key and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark import cli
from spark.common.errors import RulesInvalid, UsageProblem
from spark.pipeline import exit_code
from spark.rules import file as rules_file
from spark.rules.rule import FieldType, FindingSeverity, SourceKind
from tests.documents import DOCS, blocks
from tests.spark.world import RULES, group_rules

ENVIRONMENT = {"RECONCILE_APP": "dbname=app", "RECONCILE_BROKER": "dbname=broker"}
TEXT = RULES.format(extra='bucket = "1h"\ntag = "eu"', groups=group_rules())


def parse(text: str) -> list[str]:
    """The problems of a rules file."""
    with pytest.raises(RulesInvalid) as caught:
        rules_file.parse(text, "r.toml", ENVIRONMENT)
    return caught.value.problems


def test_everything_that_is_declared_arrives() -> None:
    rules = rules_file.parse(TEXT, environment=ENVIRONMENT)
    rule = rules.rules[0]
    assert (rules.title, rules.broker, rules.databases["broker"].schema) == ("Orders", "broker", "outbox")
    assert (rules.databases["app"].kind, rules.databases["app"].location) == (SourceKind.POSTGRES, "dbname=app")
    assert (rule.topic, rule.tag, rule.key, rule.when) == ("order.paid", "eu", "id", "paid_at IS NOT NULL")
    assert (rule.grace_seconds, rule.late_after_seconds, rule.stuck_after_seconds) == (30, 300, 900)
    assert (rule.bucket_seconds, rule.severity) == (3600, FindingSeverity.CRITICAL)
    assert [(field.column, field.body, field.type) for field in rule.fields] == [
        ("total", "total", FieldType.DECIMAL),
        ("customer", "customer", FieldType.TEXT),
        ("paid_at", "paid_at", FieldType.TIMESTAMP),
    ]
    assert [(group.name, group.table, group.key, group.within_seconds) for group in rule.groups] == [
        ("logistics", "logistics_shipment", "order_id", 600),
        ("points", "points_entry", "order_id", 600),
        ("cart", "cart_clearance", "order_id", 600),
    ]


def test_findings_up_to_a_number_or_a_share_do_not_fail_a_run() -> None:
    def tolerated(value: str, faults: int, subjects: int) -> bool:
        rules = rules_file.parse(f"{TEXT}\n[output]\nfail_above = {value}\n", environment=ENVIRONMENT)
        return rules.fail_above.covers(faults, subjects)

    assert [tolerated("10", faults, 1_000_000) for faults in (10, 11)] == [True, False]
    assert [tolerated('"0.1 %"', faults, 10_000) for faults in (10, 11)] == [True, False]
    assert not rules_file.parse(TEXT, environment=ENVIRONMENT).fail_above.covers(1, 10)
    for value in ("-1", "true", '"10"', '"101 %"', "0.5"):
        with pytest.raises(RulesInvalid, match=r'write fail_above = 10 or fail_above = "0.1 %"'):
            tolerated(value, 1, 1)
    assert exit_code({"status": "findings", "is_tolerated": True}) == 0
    assert exit_code({"status": "findings", "is_tolerated": False}) == 1


def test_the_rules_of_the_sample_are_valid() -> None:
    path = Path(__file__).resolve().parent.parent.parent / "sample_project" / "reconcile.toml"
    rules = rules_file.load(path, {"RECONCILE_ORDERS": "dbname=orders", "RECONCILE_BROKER": "dbname=broker"})
    assert [(rule.topic, [group.name for group in rule.groups]) for rule in rules.rules] == [
        ("order.paid", ["logistics", "points", "payments", "income.enrich", "cart"]),
        ("shipment.created", ["orders"]),
        ("order.enriched", ["income.windows"]),
    ]


def test_the_rules_of_the_documentation_are_valid() -> None:
    """The short file to begin with, the one that shows every key, and groups that are added to the first."""
    [first] = blocks(DOCS / "reconciliation" / "index.md", "toml")
    every, group, values, _ = blocks(DOCS / "reconciliation" / "rules.md", "toml")
    field = f'[[rule.field]]\ncolumn = "amount"\ntype = "decimal"\n{values}'
    files = (first, every, f"{first.replace('logistics', 'mail')}\n{group}\n{field}")
    loaded = [rules_file.parse(text, environment=ENVIRONMENT) for text in files]
    assert [[rule.name for rule in each.rules] for each in loaded] == [["paid orders"]] * 3
    assert [group.name for group in loaded[2].rules[0].groups] == ["mail", "logistics", "payments", "refunds"]


def test_a_changed_rule_has_another_digest() -> None:
    other = TEXT.replace('grace = "30s"', 'grace = "31s"')
    first, second = (rules_file.parse(text, environment=ENVIRONMENT).rules[0].digest for text in (TEXT, other))
    assert first != second


# Old text, new text, and the problem.
MISTAKES: list[tuple[str, str, str]] = [
    ('topic = "order.paid"', 'topik = "order.paid"', "rule['order-paid'].topik: unknown key; did you mean 'topic'?"),
    ('topic = "order.paid"', "", '.topic: missing; add topic = "…".'),
    ('grace = "30s"', "grace = 30", "not a duration: 30; write a number and a unit (ms, s, m, h, d), as in "),
    ('grace = "30s"', 'grace = "36501d"', "not a duration: '36501d'; write a number and a unit"),
    ('bucket = "1h"', 'bucket = "0s"', ".bucket: must be longer than 0"),
    ('type = "decimal"', 'type = "money"', "unknown value 'money'; use one of: text, integer, decimal"),
    ('column = "customer"', 'column = "customer"\ntolerance = 1', "a text has none; remove it"),
    ('type = "decimal"', 'type = "decimal"\ntolerance = "-1"', "not a distance: '-1'"),
    ('column = "total"', 'column = "total"\nbody = []', "must be a name, or a list of names"),
    (
        'database = "app"',
        'database = "shop"',
        "no database 'shop'; add [database.shop] or use one of: app, broker.",
    ),
    ('env = "RECONCILE_APP"', 'env = "NOWHERE"', "the environment variable 'NOWHERE' is not set; export NOWHERE="),
    ('env = "RECONCILE_APP"', 'dsn = "dbname=a password=b"', "contains a password; keep the password in the"),
    ('env = "RECONCILE_APP"', 'dsn = "postgresql://me:secret@host/a"', "contains a password"),
    ('env = "RECONCILE_APP"', 'path = "/data"', "does not fit kind 'postgres'"),
    ('env = "RECONCILE_APP"', 'namespace = "lake.shop"', "does not fit kind 'postgres'"),
    ('env = "RECONCILE_APP"', "", "needs exactly one of env, dsn, path, namespace"),
    (
        'key = "order_id"',
        'key = "order_id"\nmessage_id = "m"',
        "needs exactly one of key, message_id",
    ),
    ('name = "order-paid"', 'name = ""', "must be a text that is not empty"),
    ("version = 1", "version = 2", "must be 1, got 2; write version = 1."),
]


@pytest.mark.parametrize(("old", "new", "problem"), MISTAKES)
def test_an_error_names_key_and_remedy(old: str, new: str, problem: str) -> None:
    found = parse(TEXT.replace(old, new, 1))
    assert [each for each in found if problem in each], found


def test_two_groups_of_one_name() -> None:
    text = TEXT.replace('name = "points"', 'name = "logistics"', 1)
    assert parse(text) == ["rule['order-paid'].group: two are called 'logistics'; rename one."]


def test_a_plan_needs_no_variable_of_a_database(tmp_path: Path) -> None:
    """A plan is made from the result alone."""
    path = tmp_path / "reconcile.toml"
    path.write_text(TEXT)
    assert rules_file.load(path, {}, is_connected=False).databases["app"].location == ""


def test_all_errors_are_reported_at_once() -> None:
    text = TEXT.replace('grace = "30s"', "grace = 1").replace("version = 1", "version = 0").replace("title", "titel")
    assert [problem.split(":")[0] for problem in parse(text)] == ["titel", "version", "rule['order-paid'].grace"]


def test_syntax_errors_name_their_line() -> None:
    (problem,) = parse('version = 1\n[database.app\nenv = "X"')
    assert "at line 2" in problem and problem.startswith("not valid TOML: ")


def test_a_missing_file_and_the_command_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageProblem, match="Give the path of the rules file with --rules"):
        rules_file.load(tmp_path / "none.toml")
    assert cli.main(["check", "--rules", str(tmp_path / "none.toml")]) == 2
    broken = tmp_path / "broken.toml"
    broken.write_text("version = 3\n")
    assert cli.main(["check", "--rules", str(broken)]) == 2
    assert f"{broken}: version: must be 1" in capsys.readouterr().err


def test_passwords_do_not_show_in_what_is_printed() -> None:
    secret = {**ENVIRONMENT, "RECONCILE_APP": "dbname=app password=hunter2"}
    assert "hunter2" not in repr(rules_file.parse(TEXT, environment=secret))
