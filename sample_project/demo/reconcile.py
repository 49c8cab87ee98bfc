"""Holds the sample's tables against the broker's log with Spark, as a process of its own."""

from __future__ import annotations

from pathlib import Path

from sample_project.demo.processes import Services


def run(services: Services, directory: Path, orders_url: str, broker_url: str) -> Path | None:
    raise NotImplementedError
