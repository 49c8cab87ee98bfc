"""`python -m benchmarks [NAME…]`: run the benchmarks, each in a process of its own, and store what they print.

The tables go to benchmarks/results; `python -m benchmarks.tables` then prints them into the documents.
"""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks import results, slowed
from benchmarks.goal_parts import raw_notify
from benchmarks.harness import server

# `benchmarks.goals` measures the web path, and `benchmarks.quick` draws it beside its peers.
NAMES = ("sizing", "claims", "ticks", "status", "limits", "engines")


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        print(f"there is no benchmark {unknown[0]!r}; there are: {', '.join(NAMES)}", file=sys.stderr)
        return 2
    with slowed.if_wanted():
        with server() as url:
            speed = raw_notify(url)
        said = results.about(0, speed, {})
        print(f"{said['cpu']}, {said['cores']} cores, Python {said['python']}, raw NOTIFY {speed:,.0f} messages/s")
        stored = os.environ | {"OUTBOX_BENCH_STORE": "1", "OUTBOX_BENCH_RAW_NOTIFY": f"{speed:.0f}"}
        codes = [
            subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], env=stored, check=False).returncode
            for name in names or NAMES
        ]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
