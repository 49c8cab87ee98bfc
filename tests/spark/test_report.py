"""The report and the metrics, without Spark."""

from __future__ import annotations

import html
import json
import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from spark.common.errors import UsageProblem
from spark.common.safe_text import escaped, visible
from spark.judging import causes
from spark.judging.causes import Cause
from spark.output import metrics, report, summary
from spark.rules.rule import CLASSES, FAULTS

HOSTILE = [
    "<script>alert(1)</script>",
    "'\"><img src=x onerror=alert(1)>",
    "</td></table>",
    "a\nb\u202ec\x00",
    "日本",
    "$(rm -rf /)",
]
NOW = datetime(2025, 6, 1, 12, tzinfo=UTC).isoformat()
NONE = dict.fromkeys((name.value for name in CLASSES), 0)
RUNS = [{"finished_at": f"2025-06-01T12:00:0{number}+00:00", "open": {"LOST": number}} for number in range(3)]


def result(**counts: int) -> dict[str, Any]:
    totals = {**NONE, "OK": 10, **counts}
    faults = sum(counts.values())
    rule = {
        "name": "<rule>",
        "table": "orders_order",
        "topic": "order.paid",
        "since": None,
        "until": NOW,
        "floor": NOW,
        "watermark": NOW,
        "grace_seconds": 30.0,
        "rows_read": 10,
        "messages_read": 10,
        "counts": totals,
        "groups": {"<group>": NONE},
        "notes": ["<note>"],
    }
    reading = {
        "database": "app",
        "taken_at": NOW,
        "watermark": NOW,
        "identity": "<db>",
        "snapshot": "1:1:",
        "notes": [],
    }
    return {
        "title": "<Orders>",
        "status": "findings" if faults else "clean",
        "faults": faults,
        "new_faults": faults,
        "acknowledged": 0,
        "run": "r1",
        "mode": "full",
        "started_at": NOW,
        "finished_at": NOW,
        "last_runs": RUNS,
        "snapshots": [reading],
        "confirmed_by_snapshots": [],
        "rules": [rule],
        "totals": totals,
        "causes": described([counted(name, findings=count) for name, count in counts.items()]),
        "interval": None,
        "findings": "runs/r1/findings",
    }


def counted(name: str, detail: str = "", *, findings: int = 1, **changed: Any) -> Cause:
    """Findings of one cause; none of them is acknowledged or known."""
    numbers = dict.fromkeys(("findings", "new", "first_findings", "first_new"), findings)
    none = dict.fromkeys(("acknowledged", "first_acknowledged"), 0)
    named = {"rule": "<rule>", "group": "", "finding_class": name, "detail": detail, "severity": "critical"}
    return Cause(**{**named, **numbers, **none, "oldest": "2025-06-01T12:00:00Z", **changed})


def described(found: list[Cause], *examples: dict[str, Any]) -> list[dict[str, Any]]:
    """The causes as result.json has them."""
    return causes.described(causes.ordered(found), examples, "out put", "reconcile.toml")


def finding(text: str) -> dict[str, Any]:
    shared = ("rule", "key", "group", "detail", "row", "body", "message_id", "severity", "acknowledged", "remedy")
    times = dict.fromkeys(report.SHOWN_TIMES, "2025-06-01 12:00:00")
    message = {**dict.fromkeys(("message_id", "log_id", "tag", "state"), text), "stored_at": NOW}
    groups = {"effects": [{"group": text, "effects": 1}], "deliveries": [{"group": text, "delivery": "passed"}]}
    known = {"evidence": json.dumps({"messages": [message], **groups})}
    named = {"class": "MISMATCH", "flags": ["MISMATCH", text], "cause": causes.id_of("<rule>", "MISMATCH", "", "")}
    return {**dict.fromkeys(shared, text), **times, **known, **named}


class Tags(HTMLParser):
    """Collects tags, attributes and texts of a page, as a browser parses it."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def page(found: list[dict[str, Any]], **counts: int) -> tuple[str, Tags]:
    text = report.render(result(**counts), found)
    parsed = Tags()
    parsed.feed(text)
    return text, parsed


def test_hostile_keys_in_the_html_report() -> None:
    text, parsed = page([finding(key) for key in HOSTILE], MISMATCH=len(HOSTILE))
    assert parsed.tags.isdisjoint({"script", "img", "iframe", "object", "link"})
    assert not {name for name in parsed.attributes if name.startswith("on") or name == "src"}
    assert set(re.findall("href=['\"](.)", text)) == {"#"}, "links lead to other parts of the page only"
    assert not {key for key in "\u202e\x00" if key in text}
    for key in HOSTILE:
        for shown in (visible(key), escaped(key)):
            assert any(shown in each for each in parsed.text), shown
    assert "default-src 'none'" in text
    assert text.count("</table>") == text.count("<table")


def test_the_trace_command_is_one_word_for_the_shell() -> None:
    _, parsed = page([finding("$(rm -rf /)")], MISMATCH=1)
    assert "python manage.py outbox_message show '$(rm -rf /)'" in parsed.text
    _, parsed = page([{**finding("1"), "message_id": None}], MISMATCH=1)
    assert "no message exists" in parsed.text


def test_a_clean_report_says_so() -> None:
    text, parsed = page([])
    assert "clean" in parsed.text
    assert "http" not in text.replace("http-equiv", ""), "one file that needs nothing else"


def test_prometheus_textfile() -> None:
    text = metrics.render(result(LOST=2), "shop")
    # The labels group and topic are those of the broker's own metrics; without a group it is about the message.
    labels = 'rules="shop",rule="<rule>",topic="order.paid"'
    assert f'outbox_reconcile_keys{{{labels},group="",class="LOST"}} 2' in text
    assert f'outbox_reconcile_keys{{{labels},group="<group>",class="LATE"}} 0' in text
    assert 'outbox_reconcile_faults{rules="shop"} 2' in text
    assert re.findall(r"# TYPE (?!outbox_)", text) == []
    assert text.count("# TYPE") == 7
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(float(line.rsplit(" ", 1)[1]) >= 0 for line in samples)


def test_a_group_that_is_called_message_hides_no_message() -> None:
    found = result(LOST=2)
    found["rules"][0]["groups"] = {"message": {**NONE, "LATE": 7}}
    text = metrics.render(found, "shop")
    assert 'group="",class="LOST"} 2' in text and 'group="message",class="LATE"} 7' in text
    page = report.render(found, [])
    assert "<td>message</td>" in page and "<td>group message</td>" in page


def test_the_metrics_of_two_rules_files_stand_beside_each_other(tmp_path: Path) -> None:
    orders, refunds = tmp_path / "orders.toml", tmp_path / "refunds.toml"
    for rules in (orders, refunds):
        metrics.write(metrics.target(tmp_path, rules), result(LOST=2), rules)
    written = {path.name: path.read_text() for path in tmp_path.glob("*.prom")}
    assert sorted(written) == ["outbox_reconcile_orders.prom", "outbox_reconcile_refunds.prom"]
    samples = [line.rsplit(" ", 1)[0] for text in written.values() for line in text.splitlines() if line[0] != "#"]
    assert len(samples) == len(set(samples)), "a collector that reads both refuses a sample that is there twice"

    one = tmp_path / "outbox.prom"
    metrics.write(metrics.target(one, orders), result(), orders)
    assert metrics.target(one, orders) == one
    with pytest.raises(UsageProblem, match=r"the metrics of another rules file, .*orders\.toml"):
        metrics.target(one, refunds)


def test_what_a_repair_can_mend_comes_before_what_a_person_must_judge() -> None:
    counts = [counted("ORPHAN", findings=3), counted("LOST"), counted("HALF_STUCK"), counted("LATE"), counted("DEAD")]
    counts.append(counted("LOST", "with effects"))
    shown = [cause["subject"].replace(" of rule <rule>", "") for cause in summary.urgent({"causes": described(counts)})]
    assert shown == ["HALF_STUCK", "LOST", "DEAD", "ORPHAN", "LOST, with effects", "LATE"]


def test_a_page_says_first_what_to_do_and_how_far_it_judged() -> None:
    """The boundary, then the three most urgent causes, each with its number and its commands."""
    counts = [
        counted("DUPLICATE", severity="info", findings=900),
        counted("LATE", findings=90),
        counted("MISMATCH", findings=80, new=0),
        counted("DEAD", findings=2),
        counted("LOST", findings=5),
    ]
    found = {**result(), "causes": described([*counts, counted("ORPHAN", acknowledged=1, new=0)])}
    found["finished_at"] = "2025-06-01T12:01:05+00:00"
    shown = Tags()
    shown.feed(report.render(found, []))
    text = " ".join("".join(shown.text).split())
    parts = ("Judged up to 2025-06-01 12:00:00 UTC, 0:01:05 before the end of the run (grace: 30 s).",
        "What to do first", "LOST of rule <rule>: 5 (5 new)",
        "outbox-reconcile plan --rules reconcile.toml --output 'out put' > plan.jsonl "
        "python manage.py outbox_repair plan.jsonl --publisher '<rule>=MODULE.FUNCTION'",
        "DEAD of rule", "MISMATCH of rule", "outbox-reconcile findings --output 'out put' --cause", "Counts per class",
    )  # fmt: skip
    places = [text.find(part) for part in parts]
    assert -1 not in places and places == sorted(places), (places, text[:3000])
    assert [cause["class"] for cause in summary.urgent(found)] == ["LOST", "DEAD", "MISMATCH", "LATE", "DUPLICATE"]

    printed = summary.lines(found)
    assert printed[0].startswith("1. LOST of rule <rule>: 5 (5 new). A business row without a committed message")
    assert "Further causes in the report: 2." in printed and printed[-1].startswith("Judged up to")
    assert summary.lines(result()) == [summary.boundary(result())], "a clean run prints its boundary only"


def test_a_clean_page_folds_what_is_acknowledged_and_shows_no_command_for_it() -> None:
    known = counted("LOST", findings=2, new=0, acknowledged=2)
    found = {**result(LOST=2), "status": "clean", "faults": 0, "causes": described([known])}
    listed = {**finding("1"), "class": "LOST", "cause": known.id, "remedy": "look Then: publish it"}
    text = report.render(found, [listed])
    assert re.search(f"<details><summary><h3 id='c-{known.id}'>.*</h3></summary>.*<table class='found'>", text)
    assert "n fault" not in text and "publish it" not in text and "outbox_repair" not in text
    assert found["causes"][0]["commands"] == []
    # With an open cause, only this one's count is red.
    found = {**result(LOST=2, ORPHAN=1), "causes": described([known, counted("ORPHAN")])}
    text = report.render(found, [listed, {**listed, "class": "ORPHAN", "cause": counted("ORPHAN").id}])
    assert text.count("n fault") == 1 and text.index("ORPHAN of rule") < text.index("<details><summary><h3")


def test_a_boundary_that_lags_names_the_database_and_the_reason() -> None:
    found = result()
    found["rules"].append({**found["rules"][0], "name": "refunds", "until": "2025-06-01T09:30:00+00:00"})
    note = "a transaction has been open since 09:30"
    found["snapshots"].append(
        {**found["snapshots"][0], "database": "shop", "watermark": "2025-06-01T09:30:30+00:00", "notes": [note]}
    )
    assert summary.boundary(found) == (
        "Judged up to 2025-06-01 09:30:00 UTC for the rule refunds, 2:30:00 before the end of the run "
        f"(grace: 30 s). The database shop is complete only up to 2025-06-01 09:30:30: {note}."
    )
    found.update(mode="interval", interval=["2025-06-01T00:00:00+00:00", "2025-06-02T00:00:00+00:00"])
    assert summary.boundary(found) == "Judged: the interval from 2025-06-01 00:00:00 to 2025-06-02 00:00:00 UTC."


def test_many_findings_of_one_cause_are_one_line_that_links_to_them() -> None:
    found = [finding(str(number)) for number in range(20)]
    text, parsed = page(found, MISMATCH=10_000)
    id_ = causes.id_of("<rule>", "MISMATCH", "", "")
    assert text.count(f"<a href='#c-{id_}'>10,000</a>") == 1 and text.count(f"id='c-{id_}'") == 1
    assert text.count("<div class='remedy'>") == 1, "one remedy"
    assert "20 shown, the oldest first." in text
    assert f"outbox-reconcile findings --output 'out put' --cause {id_}" in parsed.text


def test_the_commands_fit_the_cause() -> None:
    """A group that has passed messages needs each of them again; any other group has to run."""
    oldest = {"topic": "order.paid", "message_id": "01a202f2-5fd4-7b8d-af32-bfa2220cf44e"}

    def commands(each: Cause, **changed: Any) -> list[str]:
        example = {**oldest, "cause": each.id, **changed}
        (cause,) = described([each], example)
        return list(cause["commands"])

    group: Any = {"group": "logistics"}
    offsets = "python manage.py outbox_group offsets logistics"
    assert commands(counted("UNDELIVERED", "waiting", **group)) == [offsets]
    assert commands(counted("UNDELIVERED", "passed", **group)) == [
        offsets,
        f"python manage.py outbox_message redeliver {oldest['message_id']} --group logistics",
    ]
    listing = "outbox-reconcile findings --output 'out put' --cause"
    id_ = causes.id_of("<rule>", "UNDELIVERED", "logistics", "passed")
    assert commands(counted("UNDELIVERED", "passed", findings=2, **group)) == [offsets, f"{listing} {id_}"]
    two = counted("UNDELIVERED", "passed", findings=2, **group)
    other = oldest["message_id"].replace("01a2", "02b3")
    of_cause = {**oldest, "cause": two.id}
    (cause,) = described([two], of_cause, {**of_cause, "message_id": other})
    assert cause["commands"] == [
        offsets,
        *(
            f"python manage.py outbox_message redeliver {one} --group logistics"
            for one in (oldest["message_id"], other)
        ),
    ]
    (listed,) = commands(counted("LOST", "with effects"))
    assert listed.startswith("outbox-reconcile findings "), "to publish it again would repeat the effects"
    assert commands(counted("DEAD", **group))[1] == (
        "python manage.py outbox_dead_letter replay logistics --topic order.paid"
    )
    assert commands(counted("ORPHAN")) == [f"python manage.py outbox_message show {oldest['message_id']}"]
    (listed,) = commands(counted("ORPHAN"), message_id="--help; rm -rf /")
    assert listed.startswith("outbox-reconcile findings "), "an id that is no id goes into no command"
    assert commands(counted("RECOVERED")) == []
    (cause,) = causes.described([counted("MISMATCH")], [], "s3a://key:hunter2@bucket/x", "r.toml")
    assert "hunter2" not in json.dumps(cause), "the page must not repeat a password"


def test_the_commands_act_on_no_finding_that_is_acknowledged() -> None:
    """Its message would be handled again, and its effect happen twice."""
    known, *left = (f"01a202f2-5fd4-7b8d-af32-bfa2220cf44{number}" for number in range(3))
    manage = "python manage.py outbox_"
    redeliver = [f"{manage}message redeliver {each} --group mail" for each in left]
    for name, detail, settle in (
        ("UNDELIVERED", "passed", redeliver),
        ("DEAD", "", [f"{manage}dead_letter replay mail {' '.join(left)}"]),
    ):
        each = counted(name, detail, findings=3, new=0, acknowledged=1, group="mail")
        shared = {"cause": each.id, "topic": "order.paid"}
        examples = [{**shared, "message_id": one, "acknowledged": "by ann" * (one == known)} for one in (known, *left)]
        (cause,) = described([each], *examples)
        assert cause["commands"][1:] == settle
        (cause,) = described([each], *examples[:2])
        assert cause["commands"][1:] == [cause["listing"]], "the id of one finding is not known"


def test_a_page_shows_the_first_causes_and_says_where_the_rest_is() -> None:
    """Hundreds of causes, with long evidence: the page stays one that a browser opens at once."""
    names = [name.value for name in FAULTS]
    counts = [counted(name, f"column_{n}", findings=1_000) for name in names for n in range(40)]
    found = {**result(**dict.fromkeys(names, 40_000)), "causes": described(counts)}
    long = finding("'<>\x00" * 100_000)
    samples = [
        {**long, "remedy": "Then: that.", "cause": cause["id"], "class": cause["class"]}
        for cause in found["causes"]
        for _ in range(2)
    ]
    text = report.render(found, samples)
    assert len(text.encode()) < 8_000_000
    parsed = Tags()
    parsed.feed(text)
    told = " ".join(" ".join(parsed.text).split())
    left = len(found["causes"]) - report.SHOWN_CAUSES
    assert f"{left} further causes: causes in result.json" in told
    targets = set(re.findall("id='(c-[0-9a-f]+)'", text))
    assert set(re.findall("href='#([^']*)'", text)) <= targets, "every link leads to findings"
    assert len(targets) == report.SHOWN_CAUSES and text.count("<summary>Row, messages") == 2 * report.SHOWN_CAUSES


def test_the_last_runs_are_counted_by_class() -> None:
    text, _ = page([])
    assert "Last runs" in text
    rows = re.findall(r"<tr><td class='t'>2025-06-01 12:00:0(\d)</td><td class='[^']*'>(\d)</td>", text)
    assert rows == [("2", "2"), ("1", "1"), ("0", "0")], "the newest first"


def test_null_is_apart_from_the_text_and_invisible_characters_are_shown() -> None:
    assert [visible(key) for key in ("", "null", "nullable")] == ["''", "'null'", "nullable"]
    assert escaped('{"a": "x\u00a0y\u200b"}\n') == '{"a": "x\\u00a0y\\u200b"}\n'
    text, _ = page([{**finding("1"), "row": '{"a": null, "b": "null", "c": "\u200b"}'}], MISMATCH=1)
    assert html.escape('{"a": null, "b": "null", "c": "\\u200b"}') in text
