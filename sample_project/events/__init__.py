"""The events that the apps of the shop share. They import nothing else of each other.

SAMPLE_ORDER_PAID=1 runs the code from before the change of `order.paid`, as the long form of the demo does.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING or os.environ.get("SAMPLE_ORDER_PAID", "2") == "2":
    from sample_project.events.order_paid import OrderPaid
else:
    from sample_project.events.order_paid_before import OrderPaid

__all__ = ["OrderPaid"]
