"""Writes the metrics of a result into a file for the textfile collector of Prometheus' node exporter."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from ..common.errors import UsageProblem
from . import summary

_HELP: Final = {
    "outbox_reconcile_keys": "Number of keys per class in the newest result; the label group is empty for messages.",
    "outbox_reconcile_faults": "Findings of the newest result that are not acknowledged.",
    "outbox_reconcile_new_faults": "Findings of the newest result that no earlier result had.",
    "outbox_reconcile_acknowledged": "Findings of the newest result that are acknowledged.",
    "outbox_reconcile_finished_timestamp_seconds": "The time at which the newest result was finished.",
    "outbox_reconcile_duration_seconds": "The duration of the run that made the newest result.",
    "outbox_reconcile_boundary_timestamp_seconds": "The newest result judges the rows before this time.",
}
_OWNER: Final = "# From the rules file "


def target(given: Path, rules: Path) -> Path:
    """The path of the metrics file.

    If `given` is a folder, the result is a file in `given` whose name contains the name of the rules file. Otherwise
    the result is `given`. Raises UsageProblem if the file cannot be written, or if it contains the metrics of another
    rules file: a run calls this function before any other work.
    """
    path = given / f"outbox_reconcile_{rules.stem}.prom" if given.is_dir() else given
    try:
        _draft(path, "").unlink()
        first = path.read_text(encoding="utf-8").partition("\n")[0] if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UsageProblem(f"the metrics {str(path)!r} cannot be written: {error}. Correct --metrics.") from error
    if first.startswith(_OWNER) and first != _owner(rules):
        raise UsageProblem(
            f"the metrics file {str(path)!r} contains the metrics of another rules file, "
            f"{first.removeprefix(_OWNER)}: the runs of the two rules files would replace each other's metrics. "
            f"Give each rules file its own file with --metrics, or give --metrics a folder."
        )
    return path


def write(path: Path, result: dict[str, Any], rules: Path) -> None:
    """Write the metrics of a result. The whole file is replaced at once, so the collector never reads a part of it."""
    _draft(path, f"{_owner(rules)}\n{render(result, rules.stem)}").replace(path)


def _owner(rules: Path) -> str:
    return f"{_OWNER}{' '.join(str(rules.absolute()).split())}"


def _draft(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    return draft


def render(result: dict[str, Any], name: str) -> str:
    """The metrics in Prometheus' text format.

    Every sample has the `name` of the rules as a label, because the collector reads the files of several rules.
    """
    common = f'rules="{_escaped(name)}"'
    finished = datetime.fromisoformat(result["finished_at"]).timestamp()
    started = datetime.fromisoformat(result["started_at"]).timestamp()
    samples: dict[str, list[tuple[str, float]]] = {name: [] for name in _HELP}
    for name in ("faults", "new_faults", "acknowledged"):
        samples[f"outbox_reconcile_{name}"].append((f"{{{common}}}", result[name]))
    samples["outbox_reconcile_finished_timestamp_seconds"].append((f"{{{common}}}", finished))
    samples["outbox_reconcile_duration_seconds"].append((f"{{{common}}}", round(finished - started, 3)))
    for rule in result["rules"]:
        until = datetime.fromisoformat(rule["until"]).timestamp()
        label = f'{{{common},rule="{_escaped(rule["name"])}"}}'
        samples["outbox_reconcile_boundary_timestamp_seconds"].append((label, until))
    for rule, group, name, count in summary.counts(result):
        subject = f'{common},rule="{_escaped(rule["name"])}",topic="{_escaped(rule["topic"])}"'
        samples["outbox_reconcile_keys"].append((f'{{{subject},group="{_escaped(group)}",class="{name}"}}', count))
    lines = []
    for name, help_text in _HELP.items():
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} gauge"]
        lines += [f"{name}{labels} {value}" for labels, value in samples[name]]
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
