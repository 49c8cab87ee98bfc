"""The settings of the oracle's shop, for a storm whose processes write down what they do."""

from __future__ import annotations

from outbox.utils import faults
from tests.oracle.shop.settings import *  # noqa: F403
from tests.proof import recorded_points

faults.observe(recorded_points.POINTS, recorded_points.write_down)
