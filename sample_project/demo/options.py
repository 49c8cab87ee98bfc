"""The options of a run."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Options:
    """One run. `path` is 'two-phase' or 'atomic'; `port` 0 takes a free one."""

    orders: int
    shoppers: int
    path: str
    port: int
    keep: bool
    long: bool
    reconcile: bool


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line; $KEEP, $LONG and $SAMPLE_PATH are the defaults of the options of these names."""
    parser = argparse.ArgumentParser(prog="python -m sample_project.demo", description=__doc__)
    parser.add_argument("--orders", type=_at_least(20), default=200, help="orders to pay (default: 200)")
    parser.add_argument("--shoppers", type=_at_least(1), default=6, help="customers at a time (default: 6)")
    parser.add_argument(
        "--path",
        choices=["two-phase", "atomic"],
        default=os.environ.get("SAMPLE_PATH", "two-phase"),
        help="the broker in a database of its own, or in the orders database",
    )
    parser.add_argument("--port", type=int, default=0, help="port of the site (default: a free one)")
    parser.add_argument(
        "--keep",
        action="store_true",
        default=os.environ.get("KEEP", "") not in ("", "0"),
        help="leave the site running afterwards, until Ctrl-C (KEEP=1 does the same)",
    )
    parser.add_argument("--no-reconcile", dest="reconcile", action="store_false", help="skip the Spark report")
    parser.add_argument(
        "--long",
        action="store_true",
        default=os.environ.get("LONG", "") not in ("", "0"),
        help="also deploy version 2 of order.paid while customers pay (LONG=1 does the same)",
    )
    return Options(**vars(parser.parse_args(arguments)))


def _at_least(minimum: int) -> type[int]:
    def number(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}")
        return value

    return number  # type: ignore[return-value]
