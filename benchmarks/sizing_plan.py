"""The formula of docs/operations/sizing.md and its examples, from the stored figures of benchmarks/sizing.py."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from benchmarks.results import Results

TWO_PHASE: Final = "two-phase"
ATOMIC: Final = "atomic"
# The tables that grow with the messages, and the database that has them on the two-phase path.
DATABASE_OF: Final = {
    "commit_log": "broker",
    "op_log": "broker",
    "consume_queue": "broker",
    "outbox_ledger": "application",
    "outbox_inbox": "application",
}
PHASES: Final = ("order, publish, queue", "handle", "removal")
# The databases of the table of WAL. The atomic path has only one.
APPLICATION, BROKER, BOTH, ONE = "application's", "broker's", "both", "the only one"
BYTES: Final = "Bytes per message with a body of {} bytes, {} path"
WAL: Final = "WAL bytes per message, with the business rows"

_LEDGER, _INBOX = "outbox_ledger", "outbox_inbox"
_OF_BROKER: Final = tuple(name for name, database in DATABASE_OF.items() if database == "broker")
# Dead rows between two vacuums; images of full pages.
_DISK_ALLOWANCE, _WAL_ALLOWANCE = "1.3", "1.4"
_RETENTION_DAYS, _INBOX_DAYS = 3, 14
_EXAMPLES: Final = (1, 10, 100)


@dataclass(frozen=True)
class Plan:
    """The formulas by what they compute, a table of examples, and sentences before and after this table."""

    formulas: Mapping[str, str]
    assumed: str
    header: list[str]
    rows: list[list[str]]
    shorter: str


def plan(stored: Results) -> Plan:
    """Compute the plan from the stored figures."""
    formulas = _formulas(stored)
    names = {"B": _body(stored), "G": 1, "R": _RETENTION_DAYS, "I": _INBOX_DAYS}
    rows = []
    for millions in _EXAMPLES:
        needed = _gigabytes(formulas, names | {"M": millions * 10**6})
        per_second = millions * 1e6 / 86_400
        rows.append([f"{millions} million", f"{per_second:,.0f}/s", *(f"{value:,.0f} GB" for value in needed)])
    most = _EXAMPLES[-1]
    broker, application, *_ = _gigabytes(formulas, names | {"M": most * 10**6, "R": 1, "I": 3})
    return Plan(
        formulas,
        f"For bodies of {names['B']} bytes, one group, R = {_RETENTION_DAYS} days and I = {_INBOX_DAYS} days:",
        ["messages per day", "on average", *(name.removesuffix(" per day") for name in formulas)],
        rows,
        f"With a retention of one day and an inbox of three days, {most} million messages a day need {broker:,.0f} GB "
        f"of the broker's disk and {application:,.0f} GB of the application's disk.",
    )


def _formulas(stored: Results) -> dict[str, str]:
    body = _body(stored)
    two_phase, atomic = (_rows(stored, BYTES.format(body, path), "table") for path in (TWO_PHASE, ATOMIC))
    wal = {(row["path"], row["database"]): row for row in _found(stored, WAL)}
    application, broker, only = (wal[one] for one in ((TWO_PHASE, APPLICATION), (TWO_PHASE, BROKER), (ATOMIC, ONE)))
    log = sum(_number(row["disk"]) for name, row in two_phase.items() if name in _OF_BROKER)
    inbox = _number(two_phase[_INBOX]["disk"])
    ledger = _number(two_phase[_LEDGER]["disk"]) / 24
    atomic_log = sum(_number(row["disk"]) for name, row in atomic.items() if name != _INBOX)
    return {
        "broker's disk": f"M x R x ({log - body:,.0f} + B) x {_DISK_ALLOWANCE}",
        "application's disk": f"M x (G x I x {inbox:,.0f} + {ledger:,.0f}) x {_DISK_ALLOWANCE}",
        "broker's WAL per day": _wal_formula(broker, two_phase, body, _LEDGER, _INBOX),
        "application's WAL per day": _wal_formula(application, two_phase, 0, *_OF_BROKER),
        "atomic path, disk": (
            f"M x (R x ({atomic_log - body:,.0f} + B) + G x I x {_number(atomic[_INBOX]['disk']):,.0f})"
            f" x {_DISK_ALLOWANCE}"
        ),
        "atomic path, WAL per day": _wal_formula(only, atomic, body),
    }


def _wal_formula(wal: Mapping[str, str], tables: Mapping[str, Mapping[str, str]], body: int, *elsewhere: str) -> str:
    """The WAL of one database. `body` is 0 if it does not store the body; `elsewhere`: tables that it does not have."""
    removal = {name: _number(row["WAL of its removal"]) for name, row in tables.items() if name not in elsewhere}
    per_group = _number(wal[PHASES[1]]) + removal.pop(_INBOX, 0)
    once = _number(wal[PHASES[0]]) + sum(removal.values()) - body
    return f"M x ({once:,.0f}{' + B' if body else ''} + G x {per_group:,.0f}) x {_WAL_ALLOWANCE}"


def _gigabytes(formulas: Mapping[str, str], names: Mapping[str, int]) -> list[float]:
    terms = (formula.replace(",", "").replace(" x ", " * ") for formula in formulas.values())
    return [eval(term, dict(names)) / 1e9 for term in terms]


# -- the stored tables -----------------------------------------------------------------------------


def _found(stored: Results, title: str) -> list[dict[str, str]]:
    [it] = (one for one in stored.tables if one["title"] == title)
    return [dict(zip(it["header"], row, strict=True)) for row in it["rows"]]


def _rows(stored: Results, title: str, column: str) -> dict[str, dict[str, str]]:
    return {row[column]: row for row in _found(stored, title)}


def _body(stored: Results) -> int:
    pattern = re.compile(re.escape(BYTES).replace(r"\{\}", "(.+)"))
    [size] = {found[1] for one in stored.tables if (found := pattern.fullmatch(one["title"]))}
    return int(size)


def _number(cell: str) -> float:
    return float(cell.replace(",", ""))
