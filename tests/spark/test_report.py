"""The report and the metrics, without Spark."""

from __future__ import annotations

import json
import re
from collections import Counter
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from spark.common.errors import UsageProblem
from spark.comparison.classify import CLASSES, FAULTS, FindingClass
from spark.comparison.remedies import REMEDIES
from spark.output import history, metrics, plot, report
from spark.stages import scan

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
        "snapshots": [reading],
        "confirmed_by_snapshots": [],
        "rules": [rule],
        "totals": totals,
        "findings": "runs/r1/findings",
    }


def finding(text: str) -> dict[str, Any]:
    shared = ("rule", "key", "group", "detail", "row", "body", "message_id", "severity", "acknowledged", "remedy")
    times = dict.fromkeys(report.SHOWN_TIMES, "2025-06-01 12:00:00")
    told = {
        "checks": [{"checked_at": NOW, "answer": text, "detail": text}],
        "failures": [{"consumer_group": text, "attempt": 1, "failed_at": NOW, "error": text}],
    }
    message = {**dict.fromkeys(("message_id", "log_id", "tag", "state"), text), "stored_at": NOW, **told}
    groups = {"effects": [{"group": text, "effects": 1}], "deliveries": [{"group": text, "delivery": "passed"}]}
    known = {"evidence": json.dumps({"messages": [message], **groups})}
    return {**dict.fromkeys(shared, text), **times, **known, "class": "MISMATCH", "flags": ["MISMATCH", text]}


def trend(*keys: str) -> history.Trend:
    moment = datetime.fromisoformat(NOW)
    ended = [
        {**dict.fromkeys(("key", "rule", "group", "was", "event"), key), "first_seen": moment, "finished_at": moment}
        for key in keys
    ]
    runs = [(moment.timestamp() + number, {"LOST": number}) for number in range(3)]
    return history.Trend(runs, [history.Day(moment.date(), {"LOST": 2}, 2, 1, 0)], ended)


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
    times = [("MISMATCH", 1_748_779_200.0, 1)] if found else []
    volume = {"<rule>": [(datetime(2025, 6, 1, 11, tzinfo=UTC), 10)]}
    text = report.render(
        result(**counts), found, times, volume, trend(*HOSTILE), "manage.py outbox_message show {message_id}"
    )
    parsed = Tags()
    parsed.feed(text)
    return text, parsed


def test_hostile_keys_in_the_html_report() -> None:
    text, parsed = page([finding(key) for key in HOSTILE], MISMATCH=len(HOSTILE))
    assert parsed.tags.isdisjoint({"script", "img", "iframe", "object", "link"})
    assert not {name for name in parsed.attributes if name.startswith("on") or name in ("src", "href")}
    for key in HOSTILE:
        assert any(key in shown or key.replace("\x00", "\ufffd") in shown for shown in parsed.text), key
    assert "default-src 'none'" in text
    assert text.count("</table>") == text.count("<table")


def test_the_trace_command_is_one_word_for_the_shell() -> None:
    assert report.trace_command(finding("$(rm -rf /)"), "trace {message_id}") == "trace '$(rm -rf /)'"
    assert report.trace_command({"message_id": None}, "trace {message_id}") == ""


def test_a_clean_report_says_so_and_draws_the_rows() -> None:
    text, parsed = page([])
    assert "clean" in parsed.text
    assert "<svg" in text and "10 rows" in text
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
    page = report.render(found, [], [], {}, trend(), "")
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


def test_the_documentation_says_what_findings_say() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reconciliation.md").read_text()
    for name in (*FAULTS, FindingClass.EXPIRED):
        assert f"| {name.value} | {REMEDIES[name].check} | {REMEDIES[name].settle} |" in text


def test_a_short_window_is_drawn_in_buckets_that_fit_it() -> None:
    """A minute of rows: more than one bar, and no finer than the source was queried for."""

    class Rows:
        """A source with a row per second."""

        def volume(self, selection: Any, since: Any, bucket_seconds: int) -> list[tuple[datetime, int]]:
            moments = (int(datetime.fromisoformat(NOW).timestamp()) + second for second in range(60))
            counts = Counter(moment - moment % bucket_seconds for moment in moments)
            return [(datetime.fromtimestamp(moment, UTC), count) for moment, count in sorted(counts.items())]

    source: Any = Rows()
    counted = scan.volume(source, source, None)
    assert sum(count for _, count in counted) == 60 and 30 <= len(counted) <= 61
    drawn = plot.plot([(moment.timestamp(), count) for moment, count in counted], [])
    assert drawn.count("<rect class='rows'") == len(counted)
    # Known buckets are not counted again, unless they would be a single bar.
    assert scan.volume(source, source, None, span_seconds=59) == counted
    assert scan.volume(None, source, None, known=(1, counted)) == counted  # type: ignore[arg-type]
    assert scan.volume(source, source, None, known=(3600, source.volume(source, None, 3600))) == counted


def test_every_run_of_the_history_is_a_bar_or_its_bucket_is() -> None:
    day = 86400.0
    daily = [(number * day, {"LOST": number}) for number in range(30)]
    drawn = plot.open_plot(daily)
    assert drawn.count("class='c-LOST' x") == 29 and drawn.count("<rect class='clean'") == 1
    assert "of each 1 d" in drawn
