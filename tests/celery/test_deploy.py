"""The units of deploy/systemd for Celery run the project of docs/celery.md."""

from __future__ import annotations

import functools
import signal
import subprocess
from pathlib import Path

import pytest

from tests.celery.project import Project, blocks
from tests.runbooks import systemctl
from tests.support import eventually


def command(unit: str, folder: Path) -> list[str]:
    """The command line of a unit, with the programs and the folders of the test."""
    [words] = systemctl.commands(unit)
    return [word.removeprefix("/srv/shop/.venv/bin/").replace(f"/var/lib/{unit}", str(folder)) for word in words]


@pytest.mark.slow
@pytest.mark.parametrize("shop", ["redis"], indirect=True)
def test_worker_and_beat_run_as_their_units_say(shop: Project, tmp_path: Path) -> None:
    worker, log = shop.start(*command("shop-celery", tmp_path))
    beat, log_of_beat = shop.start(*command("shop-beat", tmp_path))
    [pay] = [code for code in blocks("sh") if "import pay" in code]
    eventually(shop.is_healthy, within_seconds=60, what=log.read_text)
    shop.shell(pay)
    mails = ["invoice for A-1", "shipping A-1", "thanks for A-1"]
    eventually(lambda: shop.mails() == mails, within_seconds=60, what=log.read_text)
    eventually(lambda: "Sending due task" in log_of_beat.read_text(), within_seconds=60, what=log_of_beat.read_text)
    assert list(tmp_path.glob("schedule*"))
    for process, said in ((worker, log), (beat, log_of_beat)):
        process.send_signal(signal.SIGTERM)
        eventually(functools.partial(_ended, process), within_seconds=60, what=said.read_text)
        assert process.returncode == 0, said.read_text()


def _ended(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is not None
