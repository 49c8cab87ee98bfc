"""Alert rules and a Grafana dashboard, made from the declared conditions and the names of the metrics.

`python -m tests.house.tables` writes `alerts.yml` and `dashboard.json` into the folder of `outbox.contrib.prometheus`.
"""

from __future__ import annotations

import json
from typing import Any, Final

from tests.django import configured  # isort: skip

from outbox.broker.operations.conditions import DeclaredCondition
from outbox.contrib.django.operations.known_conditions import catalogue
from tests.house.parts import ROOT

ALERTS: Final = ROOT / "outbox/contrib/prometheus/alerts.yml"
DASHBOARD: Final = ROOT / "outbox/contrib/prometheus/dashboard.json"

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
            "Check that Prometheus scrapes the worker's HEALTH_ADDRESS, or the view metrics/, with STATUS_TOKEN.",
            wait="5m",
        ),
    ]
    # These are in the catalogue of a project with this engine only.
    from outbox.contrib.rocketmq import operations as rocketmq

    declared: dict[str, DeclaredCondition[Any]] = {**rocketmq.CONDITIONS, **catalogue()}
    for name, kind in sorted(declared.items()):
        lines += _rule(alert_name(name), _holds(name), _SEVERITY, kind.meaning, kind.next_step)
    return "\n".join(lines) + "\n"


def _holds(name: str) -> str:
    """Return an expression that is true if the condition holds; if its state is unknown, the last known state counts.

    So an alert keeps firing while the broker is down. Each value of the label `broker` has an alert of its own.
    """
    now = f'max by (broker, name) (outbox_condition{{name="{name}"}})'
    last = f'max by (broker, name) (last_over_time(outbox_condition{{name="{name}"}}[{_REMEMBERED}]))'
    return f"{now} > 0 or ({last} > 0 unless on (broker, name) {now})"


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


# What each query of the dashboard selects: the brokers and jobs that the user has chosen.
_CHOSEN: Final = 'broker=~"$broker",job=~"$job"'
_TOPICS: Final = ',scope="topics"'


def _series(metric: str, more: str = "") -> str:
    return f"{metric}{{{_CHOSEN}{more}}}"


def _rate(metric: str) -> str:
    return f"rate({_series(metric)}[5m])"


def _quantile(of: float, metric: str, by: str = "") -> str:
    return f"histogram_quantile({of}, sum by (le, broker{by}) ({_rate(metric + '_bucket')}))"


def _quantiles(metric: str, by: str) -> list[tuple[str, str]]:
    return [(_quantile(q, metric, f", {by}"), f"{{{{broker}}}} p{q * 100:.0f} {{{{{by}}}}}") for q in (0.5, 0.99)]


def _summed(of_group_and_topic: str) -> str:
    """Return an expression for the sum per group.

    Each worker and web process exports the same value. The function `max` makes one value of these equal values, so
    that `sum` does not count it several times.
    """
    return f"sum by (broker, group) (max by (broker, group, topic) ({of_group_and_topic}))"


def _one(metric: str, by: str = "", more: str = "") -> str:
    """Return an expression for a figure of the broker's tables, of which each process exports the same value."""
    return f"max by (broker{by}) ({_series(metric, more)})"


# The panels of the dashboard: title, unit, and the expressions with their legends.
PANELS: Final[list[tuple[str, str, list[tuple[str, str]]]]] = [
    (
        "Conditions (1 warning, 2 critical)",
        "none",
        [(f"{_one('outbox_condition', ', name')} > 0", "{{broker}} {{name}}")],
    ),
    ("A process sequences", "none", [(_one("outbox_leader"), "{{broker}} leader")]),
    (
        "Published per second",
        "ops",
        [(f"sum by (broker, topic) ({_rate('outbox_published_messages_total')})", "{{broker}} {{topic}}")],
    ),
    (
        "Queued per second",
        "ops",
        [(f"max by (broker, topic) ({_rate('outbox_queued_messages_total')})", "{{broker}} {{topic}}")],
    ),
    ("Handled per second", "ops", [(_summed(_rate("outbox_handled_messages_total")), "{{broker}} {{group}}")]),
    ("From publishing to the handler's end", "s", _quantiles("outbox_delivery_seconds", "group")),
    ("From publishing to the handler's start", "s", _quantiles("outbox_delivery_start_seconds", "group")),
    ("Handlers", "s", _quantiles("outbox_handler_seconds", "group")),
    ("publish()", "s", _quantiles("outbox_publish_seconds", "path")),
    ("Lag in messages", "short", [(_summed(_series("outbox_lag_messages")), "{{broker}} {{group}}")]),
    ("Lag by age", "s", [(_one("outbox_lag_seconds", ", group"), "{{broker}} {{group}}")]),
    ("Consumers", "short", [(_one("outbox_consumers", ", group"), "{{broker}} {{group}}")]),
    (
        "Retries per second, and waiting",
        "short",
        [
            (_summed(_rate("outbox_sent_back_messages_total")), "{{broker}} {{group}} sent back"),
            (_one("outbox_retrying_messages", ", group"), "{{broker}} {{group}} waiting"),
        ],
    ),
    (
        "Limited subscriptions",
        "short",
        [
            (_one("outbox_limit", ", group, topic, limit"), "{{broker}} {{group}} {{topic}} {{limit}}"),
            (_one("outbox_limit_in_use", ", group, topic"), "{{broker}} {{group}} {{topic}} running now"),
            (_one("outbox_limit_waiting_messages", ", group, topic"), "{{broker}} {{group}} {{topic}} waiting"),
        ],
    ),
    ("Dead letters", "short", [(_one("outbox_dead_letters", ", group"), "{{broker}} {{group}}")]),
    (
        "Undecided and parked",
        "short",
        [
            (_one("outbox_undecided_transactions", ", producer_group"), "{{broker}} {{producer_group}} undecided"),
            (_one("outbox_parked_transactions", ", producer_group"), "{{broker}} {{producer_group}} parked"),
        ],
    ),
    (
        "Check-backs by answer",
        "ops",
        [(f"sum by (broker, answer) ({_rate('outbox_checks_total')})", "{{broker}} {{answer}}")],
    ),
    (
        "Ticks",
        "s",
        [
            (_quantile(0.99, "outbox_tick_seconds"), "{{broker}} p99"),
            (_one("outbox_last_tick_age_seconds"), "{{broker}} since the last"),
        ],
    ),
    ("Tables, ledger and inbox", "bytes", [(_one("outbox_table_bytes", ", table"), "{{broker}} {{table}}")]),
    (
        "Conservation, as last audited",
        "short",
        [
            (
                f"sum by (broker, term) ({_one('outbox_audit_messages', ', name, term', _TOPICS)})",
                "{{broker}} {{term}}",
            ),
            (_one("outbox_audit_differences"), "{{broker}} equations that do not hold"),
        ],
    ),
]


def dashboard() -> str:
    """Return the dashboard as JSON that Grafana can import. The user chooses data source, brokers and jobs."""
    return json.dumps(
        {
            "title": "outbox",
            "uid": "outbox",
            "schemaVersion": 38,
            "refresh": "30s",
            "time": {"from": "now-3h", "to": "now"},
            "templating": {
                "list": [
                    {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"},
                    _variable("broker", "Broker", '{__name__=~"outbox_.+"}'),
                    _variable("job", "Job", '{__name__=~"outbox_.+",broker=~"$broker"}'),
                ]
            },
            "panels": [_panel(number, *panel) for number, panel in enumerate(PANELS)],
        },
        indent=1,
    )


def _variable(name: str, label: str, series: str) -> dict[str, Any]:
    """Return a variable with the values of a label. "All" also selects series without this label."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": {"query": f"label_values({series}, {name})", "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


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


def write() -> None:
    """Write both files anew."""
    assert configured.OUTBOX
    ALERTS.write_text(alerts(), encoding="utf-8")
    DASHBOARD.write_text(dashboard() + "\n", encoding="utf-8")
