"""`python -m benchmarks [NAME…]`: run the benchmarks, each in a process of its own."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

# The web path first, then the parts behind it, then comparisons.
NAMES = (
    *("web_peers", "web", "slow_disk", "wal", "bulk", "modes", "inbox"),
    *("ticks", "growth", "held_open", "checkback", "retention", "pruning", "upgrade", "status", "metrics", "tracing"),
    *("branches", "celery_worker", "engines", "forward"),
)


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        print(f"there is no benchmark {unknown[0]!r}; there are: {', '.join(NAMES)}", file=sys.stderr)
        return 2
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        "PostgreSQL on the same machine"
    )
    codes = [
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode for name in names or NAMES
    ]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
