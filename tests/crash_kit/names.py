"""The names of the cases, and what the report of each faulty one names."""

from __future__ import annotations

import ast
import os
from pathlib import Path

# A run of pytest declares the topics of its own cases only.
VARIABLE = "TEST_CASES"


def _found(kind: str) -> dict[str, str]:
    """The cases of faulty.py or correct.py. The modules need their own settings, so this one cannot import them."""
    body = ast.parse(Path(__file__).with_name(f"{kind}.py").read_text()).body
    cases = [one for one in body if isinstance(one, ast.FunctionDef) and ast.unparse(one.returns or one) == "Case"]
    broken = {one.name: [ast.literal_eval(call.args[0]) for call in one.decorator_list if isinstance(call, ast.Call)]
              for one in cases}  # fmt: skip
    return {f"{kind}.{name}": "".join(what) for name, what in sorted(broken.items())}


ALL = {**_found("faulty"), **_found("correct")}
CASES = os.environ[VARIABLE].split(",") if VARIABLE in os.environ else list(ALL)
