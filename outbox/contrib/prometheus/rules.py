"""Alert rules and a Grafana dashboard, generated from the catalogue of conditions and the names of the metrics.

`python -m outbox.contrib.prometheus.rules` writes `alerts.yml` and `dashboard.json` into the folder of this module.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from outbox.broker.operations.conditions import CATALOGUE

ALERTS: Final = Path(__file__).with_name("alerts.yml")
DASHBOARD: Final = Path(__file__).with_name("dashboard.json")

# After the state of a condition has become unknown, its alert keeps firing for this time.
_REMEMBERED: Final = "1h"
_SEVERITY: Final = "{{ if ge $value 2.0 }}critical{{ else }}warning{{ end }}"


def alert_name(condition: str) -> str:
    """Return the name of the alert, such as OutboxNoSequencer for no_sequencer."""
    return "Outbox" + "".join(part.capitalize() for part in condition.split("_"))


def alerts() -> str:
    """Return the alert rules as YAML. Strings are written as JSON, which is valid YAML."""
    lines = [
        "# One alert per condition. outbox_status shows the evidence under the name of the condition.",
        "groups:",
        "  - name: outbox",
        "    rules:",
        *_rule(
            "OutboxNotWatched",
            "absent(outbox_condition)",
            "critical",
            "No process exports the metrics of outbox, so no other alert can fire.",
            "Check that Prometheus scrapes the worker's HEALTH_ADDRESS, or the view metrics/, with METRICS_TOKEN.",
            wait="5m",
        ),
    ]
    for name, kind in CATALOGUE.items():
        lines += _rule(alert_name(name), _holds(name), _SEVERITY, kind.meaning, kind.next_step)
    return "\n".join(lines) + "\n"


def _holds(name: str) -> str:
    """Return an expression that is true if the condition holds; if its state is unknown, the last known state counts.

    So an alert keeps firing while the broker is down.
    """
    now = f'max by (name) (outbox_condition{{name="{name}"}})'
    last = f'max by (name) (last_over_time(outbox_condition{{name="{name}"}}[{_REMEMBERED}]))'
    return f"{now} > 0 or ({last} > 0 unless on (name) {now})"


def _rule(name: str, expression: str, severity: str, summary: str, description: str, *, wait: str = "1m") -> list[str]:
    return [
        f"      - alert: {name}",
        f"        expr: {json.dumps(expression)}",
        f"        for: {wait}",
        "        labels:",
        f"          severity: {json.dumps(severity)}",
        "        annotations:",
        f"          summary: {json.dumps(summary)}",
        f"          description: {json.dumps(description)}",
    ]


def _quantiles(metric: str, by: str) -> list[tuple[str, str]]:
    return [
        (f"histogram_quantile({q}, sum by (le, {by}) (rate({metric}_bucket[5m])))", f"p{q * 100:.0f} {{{{{by}}}}}")
        for q in (0.5, 0.99)
    ]


def _summed(of_group_and_topic: str) -> str:
    """Return an expression for the sum per group.

    Each worker and web process exports the same value. The function `max` makes one value of these equal values, so
    that `sum` does not count it several times.
    """
    return f"sum by (group) (max by (group, topic) ({of_group_and_topic}))"


# The panels of the dashboard: title, unit, and the expressions with their legends.
PANELS: Final[list[tuple[str, str, list[tuple[str, str]]]]] = [
    ("Conditions (1 warning, 2 critical)", "none", [("max by (name) (outbox_condition) > 0", "{{name}}")]),
    ("A process sequences", "none", [("max(outbox_leader)", "leader")]),
    ("Published per second", "ops", [("sum by (topic) (rate(outbox_published_messages_total[5m]))", "{{topic}}")]),
    ("Queued per second", "ops", [("max by (topic) (rate(outbox_queued_messages_total[5m]))", "{{topic}}")]),
    ("Handled per second", "ops", [(_summed("rate(outbox_handled_messages_total[5m])"), "{{group}}")]),
    ("From publishing to the handler's end", "s", _quantiles("outbox_delivery_seconds", "group")),
    ("From publishing to the handler's start", "s", _quantiles("outbox_delivery_start_seconds", "group")),
    ("Handlers", "s", _quantiles("outbox_handler_seconds", "group")),
    ("publish()", "s", _quantiles("outbox_publish_seconds", "path")),
    ("Lag in messages", "short", [(_summed("outbox_lag_messages"), "{{group}}")]),
    ("Lag by age", "s", [("max by (group) (outbox_lag_seconds)", "{{group}}")]),
    ("Consumers", "short", [("max by (group) (outbox_consumers)", "{{group}}")]),
    (
        "Retries per second, and waiting",
        "short",
        [
            (_summed("rate(outbox_sent_back_messages_total[5m])"), "{{group}} sent back"),
            ("max by (group) (outbox_retrying_messages)", "{{group}} waiting"),
        ],
    ),
    ("Dead letters", "short", [("max by (group) (outbox_dead_letters)", "{{group}}")]),
    (
        "Undecided and parked",
        "short",
        [
            ("max by (producer_group) (outbox_undecided_transactions)", "{{producer_group}} undecided"),
            ("max by (producer_group) (outbox_parked_transactions)", "{{producer_group}} parked"),
        ],
    ),
    ("Check-backs by answer", "ops", [("sum by (answer) (rate(outbox_checks_total[5m]))", "{{answer}}")]),
    (
        "Ticks",
        "s",
        [
            ("histogram_quantile(0.99, sum by (le) (rate(outbox_tick_seconds_bucket[5m])))", "p99"),
            ("max(outbox_last_tick_age_seconds)", "since the last"),
        ],
    ),
    ("Tables, ledger and inbox", "bytes", [("max by (table) (outbox_table_bytes)", "{{table}}")]),
    (
        "Conservation, as last audited",
        "short",
        [
            ("max by (term) (outbox_audit_messages{scope='topics'})", "{{term}}"),
            ("max(outbox_audit_differences)", "equations that do not hold"),
        ],
    ),
]


def dashboard() -> str:
    """Return the dashboard as JSON that Grafana can import. The user chooses the data source in Grafana."""
    return json.dumps(
        {
            "title": "outbox",
            "uid": "outbox",
            "schemaVersion": 38,
            "refresh": "30s",
            "time": {"from": "now-3h", "to": "now"},
            "templating": {
                "list": [{"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}]
            },
            "panels": [_panel(number, *panel) for number, panel in enumerate(PANELS)],
        },
        indent=1,
    )


def _panel(number: int, title: str, unit: str, lines: list[tuple[str, str]]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "id": number + 1,
        "title": title,
        "type": "timeseries",
        "datasource": source,
        "gridPos": {"x": 8 * (number % 3), "y": 8 * (number // 3), "w": 8, "h": 8},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + place), "expr": expression, "legendFormat": legend, "datasource": source}
            for place, (expression, legend) in enumerate(lines)
        ],
    }


if __name__ == "__main__":
    ALERTS.write_text(alerts(), encoding="utf-8")
    DASHBOARD.write_text(dashboard() + "\n", encoding="utf-8")
