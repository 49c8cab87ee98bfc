"""Print the stored figures into the documents: `python -m benchmarks.tables`.

It rewrites three pages of docs/maintainers and docs/operations/sizing.md. A block of figures is between
`<!-- figures: NAME -->` and `<!-- end of figures -->`. NAME is `goals`, a name of `_OF_SIZING`, or that of a file
in benchmarks/results.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import results
from benchmarks.__main__ import NAMES
from benchmarks.goal_list import GOALS, RATE, Bound, Goal
from benchmarks.harness import Spread
from benchmarks.peers.ways import ATOMIC_INBOX, TWO_PHASE_INBOX
from benchmarks.results import Results
from benchmarks.sizing_plan import plan
from benchmarks.ticks import SEQUENCED

ROOT = Path(__file__).resolve().parents[1]
NOT_MEASURED = "not measured"
# Two scripts of reconciliation are run by hand, because they need Java; the scenarios, because they are long.
SCRIPTS: Final = (*NAMES, "reconcile_goals", "reconcile_look_back", "scenarios")
_BLOCK = re.compile(r"(<!-- figures: ([\w. ]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def main() -> None:
    for page in pages():
        page.write_text(rendered(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(page.relative_to(ROOT))


def pages() -> list[Path]:
    docs = ROOT / "docs"
    of_maintainers = [docs / "maintainers" / f"{name}.md" for name in ("performance", "figures", "peers")]
    return [*of_maintainers, docs / "operations" / "sizing.md"]


def rendered(page: str) -> str:
    """The page with its blocks of figures made again from the files."""
    return _BLOCK.sub(lambda found: f"{found[1]}{_block(found[2])}{found[3]}", page)


def names(page: str) -> list[str]:
    """The names of the page's blocks of figures."""
    return [found[2] for found in _BLOCK.finditer(page)]


def _block(name: str) -> str:
    made = {"goals": goals_table, **_OF_SIZING}
    return made[name]() if name in made else script(name)


# -- the goals -------------------------------------------------------------------------------------


def goals_table() -> str:
    """One row per goal, with a line about each machine below."""
    parts = sorted({goal.part for goal in GOALS})
    found = {part: _of_both_machines(f"goals_{part}") for part in parts}
    header = ("what", "goal", "fast machine", "slowed machine", "met?", "script")
    lines = [
        f"- {machine} machine, part `{part}`: {about(it)}\n"
        for number, machine in enumerate(("fast", "slowed"))
        for part in parts
        if (it := found[part][number]) is not None
    ]
    rows = [goal_cells(goal, found[goal.part]) for goal in GOALS]
    return _table(header, rows) + ("\n" + "".join(lines) if lines else "")


def _of_both_machines(name: str) -> tuple[Results | None, Results | None]:
    return results.load(name), results.load(name, slowed_machine=True)


def goal_cells(goal: Goal, machines: Sequence[Results | None]) -> list[str]:
    """A row of the table; `machines` are the fast one and the slowed one."""
    values = [[bound.values(it.rows) if it else None for bound in goal.bounds] for it in machines]
    met = [_met(bound, of_bound) for bound, of_bound in zip(goal.bounds, zip(*values, strict=True), strict=True)]
    return [
        goal.what,
        "; ".join(str(bound) for bound in goal.bounds),
        *map(_shown, values),
        _once(met),
        f"`goals --part {goal.part}`",
    ]


def _shown(values: Sequence[list[float] | None]) -> str:
    return _once([_spread(one) if one else NOT_MEASURED for one in values])


def _once(texts: Sequence[str]) -> str:
    """The texts; one text if all of them say that nothing was measured."""
    return NOT_MEASURED if set(texts) == {NOT_MEASURED} else "; ".join(texts)


def _met(bound: Bound, machines: Iterable[list[float] | None]) -> str:
    """A goal is met if both machines meet it."""
    met = [bound.met(Spread.of(values).median) if values else None for values in machines]
    if False in met:
        return "no"
    return "yes" if None not in met else "yes on one" if True in met else NOT_MEASURED


def goals_text() -> str:
    """What is stored about each goal, for a terminal."""
    found = goals_table()
    return "\n".join(line.strip("| ").replace(" | ", "  |  ") for line in found.splitlines() if "|---" not in line)


# -- sizing ----------------------------------------------------------------------------------------


def sizing_plan() -> str:
    """The formula of docs/operations/sizing.md, and its examples."""
    found = results.load("sizing")
    if found is None:
        return f"The bytes of a message are {NOT_MEASURED} yet for this version.\n"
    it = plan(found)
    widest = max(map(len, it.formulas))
    formulas = "".join(f"{name:<{widest}} = {formula}\n" for name, formula in it.formulas.items())
    return f"```\n{formulas}```\n\n{it.assumed}\n\n{_table(it.header, it.rows)}\n{_wrapped(it.shorter)}"


def sequencer_rate() -> str:
    """The messages/s that one leader sequences, for each machine."""
    stored = [it for it in _of_both_machines("ticks") if it is not None]
    found = [(it, one) for it in stored for one in it.tables if one["title"].startswith(SEQUENCED)]
    if not found:
        return f"The rate is {NOT_MEASURED} yet for this version.\n"
    return "\n".join(
        f"{_capital(about(it))}\n\n{one['title']}:\n\n{_table(one['header'], one['rows'])}" for it, one in found
    )


def sizing_throughput() -> str:
    """The messages/s of the default paths, and the cores for a peak of 100 million messages a day."""
    found = results.load("goals_web")
    ways = {"atomic": ATOMIC_INBOX.name, "two-phase": TWO_PHASE_INBOX.name}
    if found is None or not all(way in found.rows for way in ways.values()):
        return f"The rates are {NOT_MEASURED} yet for this version.\n"
    rates = {path: Spread.of(found.rows[way][RATE]).median for path, way in ways.items()}
    rows = [[path, f"{rate:,.0f}", f"{rate * 86_400 / 1e6:,.0f} million"] for path, rate in rates.items()]
    peak = 100e6 / 86_400 * 4
    atomic, two_phase = (peak / rate * found.about["cores"] for rate in rates.values())
    needed = (
        f"Plan for a peak of four times the average: a hundred million messages a day are {peak / 4:,.0f}/s on average "
        f"and {peak:,.0f}/s at the peak. Extrapolated from {found.about['cores']} cores, the peak needs {atomic:.0f} "
        f"cores on the atomic path and {two_phase:.0f} on the two-phase path, for the database, the publishing web "
        f"processes and the workers together. One sequencer must keep up with the peak (next section)."
    )
    return f"{_table(['path, with inbox', 'messages/s', 'a day at this rate'], rows)}\n{_wrapped(needed)}"


_OF_SIZING: Final = {
    "sizing_plan": sizing_plan,
    "sizing_throughput": sizing_throughput,
    "sequencer_rate": sequencer_rate,
}


# -- the files of scripts --------------------------------------------------------------------------


def script(name: str) -> str:
    """The stored tables of a script, for each machine; nothing if there are none."""
    found = [it for it in _of_both_machines(name) if it is not None]
    return "\n".join(f"{_capital(about(it))}\n\n{_content(it)}" for it in found)


def _content(it: Results) -> str:
    if not it.rows:
        return "\n".join(f"{one['title']}:\n\n{_table(one['header'], one['rows'])}" for one in it.tables)
    columns = list(dict.fromkeys(column for row in it.rows.values() for column in row))
    rows = [
        [name, *(_spread(row[column]) if column in row else "" for column in columns)] for name, row in it.rows.items()
    ]
    return _table(["", *columns], rows)


def about(it: Results) -> str:
    """One line: sizes, rounds, machine, version."""
    said: dict[str, Any] = it.about
    sizes = [f"{value} {name}" if isinstance(value, str) else f"{value:,} {name}" for name, value in said["n"].items()]
    parts = [
        f"slowed by {said['slowed']}" if said["slowed"] else "",
        *sizes,
        _rounds(said["rounds"]),
        f"{said['cores']} cores ({said['cpu']})",
        said["durability"],
        f"raw NOTIFY {said['raw_notify_per_second']:,} messages/s" if said["raw_notify_per_second"] else "",
        f"commit {said['commit']}, {said['date']}",
    ]
    return "; ".join(part for part in parts if part) + "."


def _rounds(count: int) -> str:
    return "one round" if count == 1 else f"{count} rounds, median (lowest to highest)" if count else ""


# -- Markdown --------------------------------------------------------------------------------------


def _wrapped(text: str) -> str:
    """The text as lines of the documents' width."""
    return textwrap.fill(text, 120) + "\n"


def _spread(values: Sequence[float]) -> str:
    spread = Spread.of(values)
    others = f" ({_number(spread.low)} to {_number(spread.high)})" if len(values) > 1 else ""
    return _number(spread.median) + others


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(_cell(cell) for cell in cells)} |\n" for cells in (header, *rows)]
    return "".join([lines[0], "|---" * len(header), "|\n", *lines[1:]])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
