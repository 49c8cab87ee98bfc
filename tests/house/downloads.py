"""Prints how much the installations of this checkout download: `python -m tests.house.downloads [EXTRA …]`.

README, Makefile and CONTRIBUTING name these figures. pip says which files it would install into an empty environment,
and the index says how large they are.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# What `make demo` installs first and then for its report, what `make install` and what `make test` installs.
EXTRAS = ("demo", "demo,spark", "dev", "dev-all")


def size_of(item: Mapping[str, Any]) -> int:
    """The size in bytes of one file that pip would download; 0 for this checkout."""
    address = item["download_info"]["url"]
    if address.startswith("file:"):
        return 0
    with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=60) as answer:
        return int(answer.headers["Content-Length"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", nargs="*", metavar="EXTRA", default=EXTRAS, help="by default those that README names")
    for extra in parser.parse_args().extras:
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--dry-run",
            "--ignore-installed",
            "--report",
            "-",
        ]
        text = subprocess.run([*command, f"{ROOT}[{extra}]"], capture_output=True, text=True, check=True).stdout
        items = json.loads(text)["install"]
        with ThreadPoolExecutor(8) as pool:
            total = sum(pool.map(size_of, items))
        print(f"{extra}: {total / 1e6:.0f} MB in {len(items)} packages", flush=True)


if __name__ == "__main__":
    main()
