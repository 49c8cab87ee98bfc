"""Run Spin on the models of this folder: every state within the bounds, and every broken variant.

A model is correct if Spin visits all states and no assertion fails. A variant leaves out one rule of the protocol; then
an assertion must fail, or the model would prove nothing. Spin writes a C program, so a C compiler is needed too.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent
# The broken variants of each model. The first entry of a variant's name may choose another correct model: AT_ONCE.
VARIANTS: Final[Mapping[str, Sequence[str]]] = {
    "ledger": (
        *("NO_BARRIER", "BLIND_END", "ROLLBACK_FOR_ABSENT", "PRUNED_UNDECIDED", "NO_PRUNED_BEFORE"),
        *("HALF_AFTER_COMMIT", "AT_ONCE NO_TOMBSTONE", "AT_ONCE PRUNED_TOMBSTONES", "AT_ONCE PARKED_FIRST"),
        "PRUNED_BEFORE_DECIDED",
    ),
    "tick": (
        *("ID_CURSOR", "NO_LIST", "NO_TICK_KEY", "TICK_APART", "NO_LIFE", "UP_TO_OLDEST"),
        *("POOLER OFFSETS_KEPT", "POOLER ANY_LIFE", "POOLER POSITION_FIRST"),
    ),
    "lease": (
        *("NO_INBOX", "INBOX_APART", "OFFSET_FIRST", "NO_EPOCH", "GREATEST_FINISHED", "BEGUN_IS_FINISHED"),
        *("SAME_EPOCH", "TAKEN_EARLY"),
    ),
    "claim": (
        *("STORED_BEFORE_CALL", "STEP_WITHOUT_TOKEN", "FINISH_WITHOUT_TOKEN", "INBOX_AT_CLAIM", "NO_RETURN"),
        *("FINISH_APART", "CALLED_AGAIN", "CLAIMED_EARLY", "TOKEN_COUNTED"),
    ),
}
CORRECT: Final[Mapping[str, Sequence[str]]] = {
    **dict.fromkeys(VARIANTS, ("",)),
    "ledger": ("", "AT_ONCE"),
    # POOLER with three transactions has too many states for five minutes. The last N counts.
    "tick": ("", "POOLER N=2"),
    # Offsets as the code stores them. With deaths, too, the search would take minutes.
    "lease": ("", "OFFSETS_LATER DEATHS=0"),
}
# Messages and transactions of the two models with the most states: quick, and in whole.
QUICK: Final = 2
WHOLE: Final = 3
_DEPTH: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """What Spin found: the failed assertion ('': none), the number of states, and whether it visited all of them."""

    failed: str
    states: int
    is_complete: bool


def is_installed() -> bool:
    """Return whether Spin and a C compiler are on the PATH."""
    return shutil.which("spin") is not None and shutil.which("cc") is not None


def build(folder: Path, model: str, defines: Sequence[str], *options: str) -> Path:
    """Build the program that visits the states of a model. Raises CalledProcessError if the model is no Promela."""

    def call(*command: str) -> None:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)

    call("spin", *(f"-D{word}" for word in defines), "-a", str(FOLDER / f"{model}.pml"))
    call("cc", "-O1", "-w", "-DSAFETY", *options, "-o", "pan", "pan.c")
    return folder / "pan"


def run(model: str, variant: str = "", *, size: int = QUICK) -> Outcome:
    """Visit the states of a model or of one of its variants. Raises CalledProcessError if it is no Promela."""
    with tempfile.TemporaryDirectory(prefix="outbox-proof-") as folder:
        # The states of the whole models need 5 GB without compression.
        program = build(Path(folder), model, [f"N={size}", *variant.split()], "-DCOLLAPSE")
        # -E: a process that waits for ever is no error, because clocks and checkers do.
        command = [str(program), "-E", f"-m{_DEPTH}"]
        text = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
    failed = re.search(r"assertion violated (.+) \(at depth", text)
    states = re.search(r"([\d.e+]+) states, stored", text)
    assert states is not None, text
    is_complete = "Search not completed" not in text and "max search depth too small" not in text
    return Outcome(failed[1] if failed else "", int(float(states[1])), is_complete)
