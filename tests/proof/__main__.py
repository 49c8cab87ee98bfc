"""`python -m tests.proof`: check every model in whole, and that every broken variant is caught."""

from __future__ import annotations

import sys
import time

from tests.proof import models


def main() -> int:
    if not models.is_installed():
        print("Spin or a C compiler is missing. On Debian: apt-get install spin gcc. Nothing was checked.")
        return 3
    wrong = 0
    print(f"{'model':10}{'variant':28}{'states':>12}{'seconds':>9}  result")
    for model, broken in models.VARIANTS.items():
        for variant in (*models.CORRECT[model], *broken):
            is_correct = variant in models.CORRECT[model]
            began = time.monotonic()
            found = models.run(model, variant, size=models.WHOLE if is_correct else models.QUICK)
            if is_correct:
                is_right = not found.failed and found.is_complete
                said = "holds" if is_right else found.failed or "not all states were visited"
            else:
                is_right = bool(found.failed)
                said = f"caught: {found.failed}" if is_right else "NOT CAUGHT"
            wrong += not is_right
            seconds = time.monotonic() - began
            print(f"{model:10}{variant or '(the protocol)':28}{found.states:>12,}{seconds:>9.1f}  {said}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
