"""Compares the sample's tables with the broker's log by Spark, in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sample_project.demo.processes import DemoFailed, Services

_RULES: Final = Path(__file__).resolve().parent.parent / "reconcile.toml"
_PAID_ORDERS: Final = "paid orders"
# Exit codes that come with a report: clean, and with findings.
_REPORTED: Final = (0, 1)
# Half a minute on an idle machine; several times that on a busy one.
_TIMEOUT_SECONDS: Final = 300.0
_INSTALL_TIMEOUT_SECONDS: Final = 1200.0
# For some hundred rows, Spark and Java spend their time on compiling plans. The tests of reconciliation use these
# settings, too. For millions of rows they are wrong, so outbox-reconcile does not set them.
_SETTINGS: Final = {
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC",
}


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of the reconciliation.

    `right_orders` are paid orders with all their effects; `page` is the readable report.
    """

    right_orders: int
    findings: int
    page: Path


def output(directory: Path) -> Path:
    """The folder of the report, where the shop's page finds it."""
    return directory / "reconcile"


def is_installed() -> bool:
    """Whether this environment has Spark."""
    return importlib.util.find_spec("pyspark") is not None


def install(services: Services) -> None:
    """Install Spark into this virtual environment. Raises DemoFailed outside of one, and if pip fails."""
    if sys.prefix == sys.base_prefix:
        raise DemoFailed(
            "Spark is not installed, and the demo installs nothing outside of a virtual environment: "
            "run `make demo`, or leave out the report with --no-reconcile"
        )
    options = ("--quiet", "--disable-pip-version-check", "--no-compile")
    services.run(
        "install-spark", "pip", "install", *options, "--editable", ".[spark]", timeout_seconds=_INSTALL_TIMEOUT_SECONDS
    )


def run(services: Services, directory: Path, *, orders_url: str, broker_url: str) -> Report:
    """Judge everything again. Raises DemoFailed if there is no report."""
    folder = output(directory)
    shutil.rmtree(folder, ignore_errors=True)
    services.run(
        "reconcile",
        "spark",
        *("run", f"--rules={_RULES}", f"--output={folder}", "--full"),
        *(f"--conf={name}={value}" for name, value in _SETTINGS.items()),
        environment={"RECONCILE_ORDERS": orders_url, "RECONCILE_BROKER": broker_url},
        timeout_seconds=_TIMEOUT_SECONDS,
        accept=_REPORTED,
    )
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    orders = next(rule for rule in result["rules"] if rule["name"] == _PAID_ORDERS)
    return Report(
        right_orders=min(counts["OK"] for counts in (orders["counts"], *orders["groups"].values())),
        findings=result["faults"],
        page=folder / result["report"],
    )
