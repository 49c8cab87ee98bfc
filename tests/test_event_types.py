"""Type checkers know the type of `delivery.body` from the annotation of a handler; mypy and pyright are run."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CODE = """
from collections.abc import Sequence
from dataclasses import dataclass

from outbox import Delivery
from outbox.events import event
from outbox.contrib.django import ClaimedDelivery, subscriber


@event("order.paid")
@dataclass
class OrderPaid:
    order_id: int


@event("order.lost", topic="order.paid")
@dataclass
class OrderLost:
    reason: str


@subscriber("order.paid", group="one")
def one(delivery: Delivery[OrderPaid]) -> None:
    reveal_type(delivery.body)
    delivery.body.order


@subscriber(OrderPaid, group="several", batch=10)
def several(deliveries: Sequence[Delivery[OrderPaid]]) -> None:
    reveal_type(deliveries[0].body)


@subscriber(OrderPaid, group="either")
def either(delivery: Delivery[OrderPaid | OrderLost]) -> None:
    reveal_type(delivery.body)


@subscriber(OrderPaid, group="outside", effects="outside")
def outside(delivery: ClaimedDelivery[OrderPaid]) -> None:
    reveal_type(delivery.body)


@subscriber("order.paid", group="plain")
def plain(delivery: Delivery) -> None:
    reveal_type(delivery.body)


reveal_type(OrderPaid(1).order_id)
"""
EXPECTED = ["OrderPaid", "OrderPaid", "OrderPaid | OrderLost", "OrderPaid", "Any", "int"]


def revealed(output: str) -> list[str]:
    """The revealed types in order; without the names of their modules, and without builtins."""
    found = re.findall(r"(?:Revealed type is|Type of \".*\" is) \"(.*)\"", output)
    return [re.sub(r"\b(?:\w+\.)+(?=\w)", "", text) for text in found]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_the_type_of_a_body_is_inferred(checker: str, tmp_path: Path) -> None:
    (tmp_path / "handlers.py").write_text(CODE)
    if checker == "mypy":
        # Strict, as a project without the settings of this one; stubs of Django are not needed.
        command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--config-file=", "handlers.py"]
    elif shutil.which("npm") is None:
        pytest.skip("needs npm, which brings pyright")
    else:
        subprocess.run(["npm", "install", "--silent", "pyright@1"], cwd=tmp_path, check=True, timeout=240)
        # An installed package has py.typed; this is the tree beside it.
        (tmp_path / "pyrightconfig.json").write_text(f'{{"extraPaths": ["{ROOT}"], "include": ["handlers.py"]}}')
        command = ["npx", "pyright", "--pythonpath", sys.executable]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin", "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert revealed(done.stdout) == EXPECTED, done.stdout + done.stderr
    # Exactly the wrong name is an error.
    errors = [line for line in done.stdout.splitlines() if " error: " in line or " - error: " in line]
    assert len(errors) == 1 and '"order"' in errors[0], done.stdout
