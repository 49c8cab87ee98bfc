"""Runs the oracle on copies of the product with one planted fault each, and names those that the checker misses.

    python -m tests.oracle.faulty            all of them
    python -m tests.oracle.faulty 03 07      two of them

A fault is a patch in `planted/`, whose first lines say what it does. A patch that does not apply any more has to be
written again for the present code: the fault must stay red in whatever form it then takes.

docs/maintainers/storms.md has the number of storms that each one took.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATCHES = Path(__file__).parent / "planted"
# A storm has some hundred transactions. A fault that needs a rare moment is found in one of several storms.
STORMS = 4
SECONDS = 40


def plant(patch: Path, folder: Path) -> None:
    """Make a copy of the product and of the oracle with the fault."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "outbox", folder / "outbox", ignore=ignore)
    (folder / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "__init__.py", folder / "tests")
    shutil.copytree(ROOT / "tests" / "oracle", folder / "tests" / "oracle", ignore=ignore)
    subprocess.run(
        ["git", "apply", str(patch)], cwd=folder, check=True, env=os.environ | {"GIT_CEILING_DIRECTORIES": "/"}
    )


def is_found(patch: Path) -> bool:
    """Whether a violation is found in the copy. Prints what the storms say, and the rules that are broken."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="planted-", ignore_cleanup_errors=True) as made:
        folder = Path(made)
        plant(patch, folder)
        for number in range(STORMS):
            command = [sys.executable, "-W", "ignore", "-m", "tests.oracle", "--storms", "1", "--seconds", str(SECONDS)]
            run = subprocess.run([*command, "--seed", str(number + 1)], cwd=folder, text=True, stdout=subprocess.PIPE)
            print(run.stdout, end="", flush=True)
            if run.returncode:
                rules = sorted(set(re.findall(r"^  (\w+): ", run.stdout, re.MULTILINE)))
                print(f"storm {number + 1}, {time.monotonic() - began:.0f} s: {', '.join(rules)}", flush=True)
                return bool(rules)
    return False


def main() -> int:
    """Run the chosen faults, and name those that were not found."""
    patches = sorted(PATCHES.glob("*.patch"))
    chosen = [patch for patch in patches if not sys.argv[1:] or patch.name.split("-")[0] in sys.argv[1:]]
    missed = []
    for patch in chosen:
        print(f"== {patch.stem}", flush=True)
        if not is_found(patch):
            missed.append(patch.stem)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} planted faults found; missed: {', '.join(missed) or 'none'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
