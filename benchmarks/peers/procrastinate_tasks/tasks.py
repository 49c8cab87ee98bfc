"""The task."""

from __future__ import annotations

from typing import Any

from procrastinate.contrib.django import app

from benchmarks.peers.record import handled


@app.task
def paid(body: dict[str, Any]) -> None:
    handled(body["number"])
