"""The output of the demo: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from outbox.utils.safe_text import for_people, inert
from sample_project.demo.figures import Figures
from sample_project.demo.verdicts import Verdict

_PLAIN_EVERY_SECONDS = 3.0


class Display:
    """Prints progress. `step` and `note` print lines; between `open` and `close` there is a live view."""

    def __init__(self, orders: int) -> None:
        self.console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._started = time.monotonic()
        self._orders = orders
        self._live: Live | None = None
        self._bar = Progress(TextColumn("[bold]orders"), BarColumn(40), MofNCompleteColumn(), console=self.console)
        self._task = self._bar.add_task("orders", total=orders)
        self._last_plain = 0.0

    def step(self, text: str) -> None:
        """Print a new phase."""
        self.console.print(f"[dim]{time.monotonic() - self._started:5.1f} s[/] [bold]{text}[/]")

    def note(self, text: str, *, style: str = "yellow") -> None:
        """Print an event."""
        self.console.print(f"        [{style}]{text}[/]")

    def expect(self, orders: int) -> None:
        """Change the number of customers, after more have come."""
        self._orders = orders
        self._bar.update(self._task, total=orders)

    def open(self) -> None:
        """Start the live view."""
        if self.console.is_terminal:
            self._live = Live(self._bar, console=self.console, refresh_per_second=8, transient=True)
            self._live.start()

    def show(self, answered: int, figures: Figures) -> None:
        """Show the progress."""
        self._bar.update(self._task, completed=answered)
        if self._live is not None:
            self._live.update(Group(self._bar, _arrivals(figures)))
        elif time.monotonic() - self._last_plain > _PLAIN_EVERY_SECONDS:
            self._last_plain = time.monotonic()
            self.console.print(
                f"        {answered}/{self._orders} answered, {figures.paid} paid, {figures.shipments} shipments, "
                f"{figures.points} points, {figures.clearances} carts, {figures.state('undecided')} undecided"
            )

    def close(self) -> None:
        """End the live view."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def waiting(self, text: str) -> AbstractContextManager[object]:
        """Show a spinner during a long step (on a terminal)."""
        return self.console.status(text)

    def states(self, figures: Figures) -> None:
        """Print the messages by topic and state."""
        table = Table(title="\nMessages", title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
        table.add_column("topic")
        table.add_column("state")
        table.add_column("messages", justify="right")
        for (topic, state), number in figures.states.items():
            table.add_row(topic, state, f"{number:,}")
        self.console.print(table)

    def result(self, verdicts: Sequence[Verdict]) -> None:
        """Print the result."""
        table = Table(title="\nResult", title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
        table.add_column("figure")
        table.add_column("number", justify="right")
        table.add_column("wanted", justify="right")
        table.add_column("")
        for verdict in verdicts:
            mark = "" if not verdict.wanted else "[green]ok[/]" if verdict.good else "[bold red]WRONG[/]"
            table.add_row(verdict.name, f"{verdict.number:,}", verdict.wanted, mark)
        self.console.print(table)

    def failure(self, text: str, log: str, lines: Sequence[str]) -> None:
        """Print why the demo failed, with the end of the relevant log."""
        self.close()
        self.console.print(f"[bold red]The demo failed:[/] {escape(for_people(text))}")
        if lines:
            self.console.print(f"[dim]the end of {log}:[/]")
            for line in lines:
                self.console.print(inert(line), markup=False)


def _arrivals(figures: Figures) -> Text:
    settled = figures.state("committed by check-back") + figures.state("rolled back by check-back")
    line = Text(no_wrap=True, overflow="ellipsis")
    for number, name in (
        (figures.paid, "paid"),
        (figures.shipments, "shipments"),
        (figures.points, "points"),
        (figures.clearances, "carts"),
        (figures.state("undecided"), "undecided"),
        (settled, "checked back"),
    ):
        line.append(f"{number} ", style="bold").append(f"{name}   ", style="dim")
    return line
