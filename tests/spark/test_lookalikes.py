"""Values that a reader may take for others, and differing texts that must look different in a finding."""

from __future__ import annotations

import json
import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from spark.common.errors import RunIncomplete, UsageProblem
from spark.common.safe_text import shown_difference, visible
from spark.judging import evidence
from spark.judging.json_text import values_at
from spark.rules.rule import FieldRule, FieldType, Rule
from tests.spark.conftest import Reconciler
from tests.spark.exports import export_csv, export_parquet
from tests.spark.test_files import folders
from tests.spark.world import START, Order, World

pytestmark = pytest.mark.timeout(900)
DEEP = '{"customer": "x", "b": ' + "[" * 1_200 + "]" * 1_200 + "}"
BODIES = {
    DEEP: "",
    '{"a": ' + "1" * 1_500 + "}": "",
    '{"b": "\\ud800"}': "",
    '{"a": "\\ud800"}': "a has one half of a surrogate pair, \\ud800, which no text of a database has",
    '{"a": "\t"}': "the body is not JSON: Invalid control character at: line 1 column 8 (char 7)",
    '{"a": NaN}': "the body is not JSON: it contains NaN",
    '{"a": 1}\n{"a": 2}': "the body is not one JSON object: it goes on at character 10",
    '{"a": 1}}': "the body is not one JSON object: it goes on at character 9",
    '{"a": 1 2}': "the body is not JSON: Expecting ',' delimiter: line 1 column 9 (char 8)",
    "[1]": "the body is not one JSON object",
    '{"a": ' + "[" * 100_000: "the body is not JSON of at most 3,000 levels",
    '{"a": "}{", "a": "\\ud83d\\ude00"}': "",
}


@pytest.mark.parametrize("body", BODIES)
def test_a_body_that_is_not_json_is_told_from_one_that_spark_cannot_parse(body: str) -> None:
    assert values_at(body, [[("a",)]], is_object=True)[0] == BODIES[body]


def test_what_is_json_is_what_python_takes_for_it() -> None:
    seed = random.Random().getrandbits(32)
    chosen = random.Random(seed)
    pieces = [*'{}[],: 10-.\n\\"', '"a"', '"b', "e3", "true", "null", '"\\u00e9"', "\x01"]

    def refuse(_: str) -> None:
        raise ValueError

    for _ in range(20_000):
        text = "".join(chosen.choices(pieces, k=chosen.randint(1, 9)))
        try:
            json.loads(text, parse_constant=refuse)
            is_json = True
        except ValueError:
            is_json = False
        assert (values_at(text, [], is_object=False)[0] == "") is is_json, (seed, text)


def _of_python(value: Any, path: tuple[str, ...]) -> str | None:
    """The text of a scalar that Python's parser finds at a path."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, str) or value is None else json.dumps(value)


def test_values_are_those_that_python_reads() -> None:
    """Also of equal names, of which the last one counts, and of objects inside of lists, which no path names."""
    seed = random.Random().getrandbits(32)
    chosen = random.Random(seed)

    def value(depth: int) -> str:
        kind = chosen.randrange(3 if depth else 1)
        if kind == 0:
            return chosen.choice(['"x"', "7", "-0.25", "true", "null", '"\\u00e9\\n"', '"{"', '"\\ud83d\\ude00"'])
        inner = [value(depth - 1) for _ in range(chosen.randrange(4))]
        if kind == 1:
            return f"[{','.join(inner)}]"
        return "{" + " , ".join(f'"{chosen.choice(["a", "b", chr(92) + "u0061"])}" : {each}' for each in inner) + "}"

    paths = [("a",), ("b",), ("a", "b"), ("b", "a", "a")]
    for _ in range(5_000):
        text = f'{{"a": {value(3)}, "b": {value(3)}}}'
        problem, texts = values_at(text, [[path] for path in paths], is_object=True)
        document = json.loads(text)
        for path, found in zip(paths, texts, strict=True):
            expected = _of_python(document, path)
            if expected is None or expected[:1] not in "[{" or expected == "{":
                assert (problem, found) == ("", expected), (seed, text, path)


@pytest.mark.slow
def test_a_run_says_what_is_wrong_with_bodies_and_how_values_differ(reconcile: Reconciler, world: World) -> None:
    """Two documents in one body; JSON beyond Spark's limits, which is no fault; texts that look alike."""
    world.add(*(Order(number=number) for number in range(1, 9)), Order(number=90, at=START + timedelta(hours=1)))
    good = Order(number=1).body.decode()

    def body(number: int, text: str) -> None:
        world.broker.execute("UPDATE commit_log SET body = %s WHERE key = %s", [text.encode(), str(number)])

    body(1, f"{good}\n{good}")
    body(2, Order(number=2).body.decode()[:-1] + f', "more": {DEEP}}}')
    body(3, Order(number=3).body.decode().replace('"customer 3"', "null"))
    world.app.execute("UPDATE orders_order SET customer = 'null' WHERE id = 3")
    body(4, Order(number=4).body.decode().replace("customer 4", "Zo\u00eb"))
    world.app.execute("UPDATE orders_order SET customer = %s WHERE id = 4", ["Zoe\u0308"])
    body(5, Order(number=5).body.decode().replace("customer 5", "customer 5 "))
    body(6, Order(number=6).body.decode().replace("customer 6", "customer\u00a06"))
    body(7, Order(number=7).body.decode().replace(START.isoformat(), "12:30"))
    body(8, Order(number=8).body.decode().replace("customer 1", "}{"))
    world.app.execute("UPDATE orders_order SET customer = '}{' WHERE id = 8")
    world.app.execute("UPDATE orders_order SET total = total + 1 WHERE id = 6")
    reconcile.rules(groups=())
    result = reconcile.run()
    rows = {row["key"]: row for row in reconcile.rows(result)}
    assert {key: row["class"] for key, row in rows.items()} == {
        **dict.fromkeys(("1", "7"), "UNREADABLE"),
        **dict.fromkeys(("3", "4", "5", "6"), "MISMATCH"),
    }
    # One cause for each column that differs; a finding in two columns is one finding of the result.
    assert rows["6"]["mismatched"] == ["total", "customer"] and rows["1"]["mismatched"] is None
    assert [(cause["class"], cause["detail"], cause["findings"], cause["new"]) for cause in result["causes"]] == [
        ("UNREADABLE", "", 2, 2), ("MISMATCH", "customer", 4, 4), ("MISMATCH", "total", 1, 1),
    ]  # fmt: skip
    assert result["faults"] == result["new_faults"] == 6
    report = (reconcile.folder / "out" / "report.html").read_text()
    assert f"<a href='#c-{result['causes'][1]['id']}'>4</a>" in report
    details = {key: row["detail"].partition(": ")[2] for key, row in rows.items()}
    assert details["1"].startswith("the body is not one JSON object: it goes on at character")
    assert details["3"] == "customer 'null' in the row, null in the body"
    assert details["4"] == (
        "customer 'Zoe\\u0308' in the row, 'Zo\\u00eb' in the body (they differ in Unicode normalisation)"
    )
    assert details["5"] == "customer 'customer 5' in the row, 'customer 5 ' in the body (they differ in spaces)"
    assert details["6"] == (
        "total 13.5 in the row, 12.5 in the body; "
        "customer 'customer 6' in the row, 'customer\\u00a06' in the body (they look alike)"
    )
    assert details["7"] == "paid_at is '12:30', which is no timestamp with a date"


@pytest.mark.parametrize(
    ("ours", "theirs", "shown"),
    [
        (None, "null", ("null", "'null'", "")),
        ("a", "a\u200b", ("'a'", "'a\\u200b'", "")),
        ("a\\u200b", "a\u200b", ("'a\\\\u200b'", "'a\\u200b'", "")),
        ("\u0430bc", "abc", ("'\\u0430bc'", "'abc'", "they look alike")),
        ("\u738b", "\u674e", ("'\u738b'", "'\u674e'", "")),
        ("x" * 1_000 + "a", "x" * 1_000 + "b", (f"…'{'x' * 100}a'", f"…'{'x' * 100}b'", "from character 1001 on")),
    ],
)
def test_two_values_that_differ_differ_as_shown(ours: str | None, theirs: str, shown: tuple[str, str, str]) -> None:
    assert shown_difference(ours, theirs) == shown


def test_a_key_shows_what_cannot_be_seen() -> None:
    assert [visible(key) for key in ("A-1", "A-1 ", "A\u00a01", "Zo\u00eb", "it's", "a\\b")] == [
        "A-1", "'A-1 '", "'A\\u00a01'", "Zo\u00eb", "it's", "a\\b",
    ]  # fmt: skip


VALUES = {
    FieldType.TIMESTAMP: {
        "12:30": False, "T12:30": False, "12:30:00+02": False, "2024": False, "2024-05": False, "2024-05-06 12": False,
        "2024-05-06": True, "2024-05-06 12:30": True, "2024-05-06T12:30:00+02:00": True, " 2024-5-6 1:02 ": True,
        "2024-05-06 12:30:00 Europe/Berlin": True, "+12024-05-06T12:30:00": True,
    },
    FieldType.DATE: {
        "2024": False, "2024-05": False, "2024-05-06 xyz": False, "2024-05-06T": False, "0044-03-15 BC": False,
        "2024-05-06": True, "2024-5-6": True, "2024-05-06T12:30:00Z": True,
    },
    FieldType.DECIMAL: {"\uff11\uff12": False, "\u0663": False, "12": True, " 1e2 ": True},
}  # fmt: skip


def test_casts_do_not_make_up_what_a_value_does_not_say(spark_session: SparkSession) -> None:
    kinds = list(VALUES)
    rule = Rule(
        name="r", database="d", table="t", key="id", time="at", topic="x",
        fields=tuple(FieldRule(column=kind.value, body=kind.value, type=kind) for kind in kinds),
    )  # fmt: skip
    rows = [(n, value, json.dumps({kind.value: value})) for n, kind in enumerate(kinds) for value in VALUES[kind]]
    frame = spark_session.createDataFrame(rows, "place int, value string, body string")
    found = evidence.read_again(frame, rule).select("place", "value", *evidence.body_values(rule)).collect()
    read = {(row["place"], row["value"]): row[f"v{row['place']}"] is not None for row in found}
    assert read == {(n, value): VALUES[kinds[n]][value] for n, value, _ in rows}


@pytest.mark.slow
def test_a_time_of_day_in_an_export_ends_the_run(reconcile: Reconciler, world: World, tmp_path: Path) -> None:
    """It would be today's, so that the row were never old enough to be judged."""
    world.add(Order(number=1))
    export_csv(world.app, "orders_order", tmp_path / "orders_order.csv")
    export_parquet(world.broker, "message_v1", tmp_path / "message_v1.parquet")
    run = folders(reconcile, "csv", tmp_path)
    assert reconcile.findings(run()) == []
    text = (tmp_path / "orders_order.csv").read_text()
    (tmp_path / "orders_order.csv").write_text(text.replace("2025-06-01 12:00:00+00:00", "12:30"))
    with pytest.raises(RunIncomplete, match="paid_at is '12:30', which is no timestamp with a date"):
        run()


@pytest.mark.parametrize("log", ["_delta_log", "metadata/v1.metadata.json", ".hoodie"])
def test_a_folder_of_a_table_format_is_not_read_as_parquet(
    reconcile: Reconciler, world: World, tmp_path: Path, log: str
) -> None:
    """Its removed files are still there, and only its log says which they are."""
    for level in (tmp_path / "message_v1.parquet", tmp_path / "orders_order"):
        level.mkdir()
    marker = tmp_path / "orders_order" / log
    if marker.suffix:
        marker.parent.mkdir()
        marker.touch()
    else:
        marker.mkdir()
    run = folders(reconcile, "parquet", tmp_path)
    with pytest.raises(UsageProblem, match=r"orders_order is a table of Delta Lake.*removed or replaced"):
        run()
