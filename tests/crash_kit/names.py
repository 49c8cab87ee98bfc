"""The names of the cases."""

from __future__ import annotations

import os
from pathlib import Path

# A run of pytest declares the topics of its own cases only.
VARIABLE = "TEST_CASES"

_FOLDER = Path(__file__).parent
ALL = [
    f"{kind}.{path.stem}"
    for kind in ("faulty", "correct")
    for path in sorted((_FOLDER / kind).glob("*.py"))
    if path.stem != "__init__"
]
CASES = os.environ[VARIABLE].split(",") if VARIABLE in os.environ else ALL
