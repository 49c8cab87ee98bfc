"""The other engine of a run: a private Apache RocketMQ, if asked for."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from outbox.errors import OutboxError
from sample_project.demo.display import Display
from sample_project.demo.options import Options
from sample_project.demo.processes import DemoFailed
from sample_project.rocketmq_server import VERSION, PrivateRocketMQ, fetch_programs

# Short for a demonstration; RocketMQ's defaults are 6 s and 30 s.
_CHECK_BACK = {
    "transactionTimeOut": 2000,
    "transactionCheckInterval": 2000,
    "transactionCheckMax": 60,
    "transactionOpBatchInterval": 50,
}


@contextlib.contextmanager
def running(options: Options, display: Display, directory: Path) -> Iterator[PrivateRocketMQ | None]:
    """The server of this run, or None on PostgreSQL. Raises DemoFailed."""
    if options.engine != "rocketmq":
        yield None
        return
    display.step(f"starting RocketMQ {VERSION} (the first time Maven fetches it)")
    folder = directory / "rocketmq" / "server"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        server = PrivateRocketMQ(folder, fetch_programs(directory / "rocketmq"), broker=_CHECK_BACK)
        server.start()
        display.note("RocketMQ refuses effects='outside', limits and schedules (docs/engines.md),")
        display.note("so this shop has no apps payments and offers: no order is charged, and no mail is sent")
    except OutboxError as error:
        raise DemoFailed(str(error)) from error
    try:
        yield server
    finally:
        server.kill()
