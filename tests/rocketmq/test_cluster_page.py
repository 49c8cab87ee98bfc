"""A newcomer starts a cluster by docs/engines.md alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from outbox.rocketmq.admin import Admin, brokers_of
from tests.django import processes
from tests.documents import blocks
from tests.rocketmq.cluster import PAGE, choose_ports, write_programs
from tests.rocketmq.conftest import PROGRAMS, ROOT, unique
from tests.rocketmq.project import Project, happened, nothing_lost_invented_or_doubled
from tests.rocketmq.test_cluster import VERSION
from tests.rocketmq_server import fetch_programs
from tests.support import eventually


@dataclass(frozen=True)
class Address:
    """The address of a cluster (tests.rocketmq.project.Server)."""

    url: str

    @property
    def admins(self) -> list[Admin]:
        """The administration ports of its brokers."""
        return brokers_of(self.url)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_newcomer_starts_a_cluster_by_the_page(
    programs: Path, application: None, outbox_settings: Callable[..., None], tmp_path: Path
) -> None:
    """Bash runs the blocks of the page one after the other. Only the ports are the test's own."""
    write_programs(tmp_path / "programs", fetch_programs(PROGRAMS, VERSION))
    manage = tmp_path / "programs" / "manage.py"
    manage.write_text(f'#!/bin/sh\ncd {ROOT}\nexec {sys.executable} -m django "$@"\n')
    manage.chmod(0o755)
    variables, *others, stop = blocks(PAGE, "sh")
    [settings] = blocks(PAGE, "python")
    ports = choose_ports()
    for name, port in re.findall(r"(\w+)=(\d+)", variables):
        variables = variables.replace(f"{name}={port}", f"{name}={ports[name]}")
        settings = settings.replace(f":{port}", f":{ports[name]}")
    given: dict[str, Any] = {}
    exec(settings, given)
    server = Address(given["OUTBOX"]["BROKER"])
    project = Project(server, (unique("orders."), unique("steps."), unique("later.")), unique("effects"))
    environment = {
        **processes.environment(),
        **project.environment(),
        "PATH": f"{tmp_path / 'programs'}:{os.environ['PATH']}",
    }
    try:
        script = "\n".join([variables, *others])
        subprocess.run(["bash", "-euc", script], cwd=tmp_path, env=environment, check=True, timeout=400)
        with project.consumer():
            assert project.produced({"a": "", "b": ""}) == {"a": 0, "b": 0}
            nothing_lost_invented_or_doubled()
    finally:
        subprocess.run(["bash", "-uc", f"{variables}\n{stop}"], cwd=tmp_path, check=True)
        running = [Path("/proc", file.read_text().strip()) for file in (tmp_path / "cluster").glob("*/pid")]
        # A broker stores its positions before it ends.
        eventually(lambda: not any(process.exists() for process in running), within_seconds=120)
    assert len(happened()) == 24
