"""A file for the textfile collector of Prometheus' node exporter."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from .errors import UsageProblem

_HELP: Final = {
    "outbox_reconcile_keys": "Keys of the newest result by class; subject is a consumer group, or message.",
    "outbox_reconcile_faults": "Findings of the newest result that are not acknowledged.",
    "outbox_reconcile_new_faults": "Those of them that no earlier result had.",
    "outbox_reconcile_acknowledged": "Findings of the newest result that are acknowledged.",
    "outbox_reconcile_finished_timestamp_seconds": "When the newest result was finished.",
    "outbox_reconcile_duration_seconds": "How long its run took.",
    "outbox_reconcile_boundary_timestamp_seconds": "Rows before this were judged.",
}


def check_writable(path: Path) -> None:
    """Raise UsageProblem unless the file can be written, before any work is done."""
    try:
        _draft(path, "").unlink()
    except OSError as error:
        raise UsageProblem(f"the metrics {str(path)!r} cannot be written: {error}. Correct --metrics.") from error


def write(path: Path, result: dict[str, Any]) -> None:
    """Write the metrics of a result; the file is replaced whole, so the collector never reads half of it."""
    _draft(path, render(result)).replace(path)


def _draft(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    return draft


def render(result: dict[str, Any]) -> str:
    """The metrics in Prometheus' text format."""
    finished = datetime.fromisoformat(result["finished_at"]).timestamp()
    started = datetime.fromisoformat(result["started_at"]).timestamp()
    samples: dict[str, list[tuple[str, float]]] = {name: [] for name in _HELP}
    for name in ("faults", "new_faults", "acknowledged"):
        samples[f"outbox_reconcile_{name}"].append(("", result[name]))
    samples["outbox_reconcile_finished_timestamp_seconds"].append(("", finished))
    samples["outbox_reconcile_duration_seconds"].append(("", round(finished - started, 3)))
    for rule in result["rules"]:
        until = datetime.fromisoformat(rule["until"]).timestamp()
        label = f'rule="{_escaped(rule["name"])}"'
        samples["outbox_reconcile_boundary_timestamp_seconds"].append((f"{{{label}}}", until))
        for subject, counts in {"message": rule["counts"], **rule["groups"]}.items():
            for name, count in counts.items():
                labels = f'{{{label},subject="{_escaped(subject)}",class="{name}"}}'
                samples["outbox_reconcile_keys"].append((labels, count))
    lines = []
    for name, help_text in _HELP.items():
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} gauge"]
        lines += [f"{name}{labels} {value}" for labels, value in samples[name]]
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
