"""`systemctl start|stop UNIT...` for a test: runs the command of a unit file of deploy/systemd as systemd does.

The unit shop-web is the one that is replaced: a process that places orders (traffic.py) in place of gunicorn. A name
may have an instance: `shop-worker@new` runs shop-worker.service beside `shop-worker`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def unit(name: str) -> dict[str, list[str]]:
    """The section [Service] of a unit file: the values of each key, which a unit may repeat."""
    text = (ROOT / "deploy" / "systemd" / f"{name.partition('@')[0]}.service").read_text()
    service = text.partition("[Service]\n")[2].partition("\n[")[0]
    found: dict[str, list[str]] = {}
    for key, value in re.findall(r"^(\w+)=(.*)$", service, re.MULTILINE):
        found.setdefault(key, []).append(value)
    return found


def commands(name: str) -> list[list[str]]:
    """The command lines of a unit, with this Python in place of the one in /srv/shop."""
    return [
        [sys.executable if word.endswith("/bin/python") else word for word in shlex.split(line)]
        for line in unit(name)["ExecStart"]
    ]


def main() -> None:
    folder, verb, *names = Path(os.environ["TEST_FOLDER"]), *sys.argv[1:]
    for name in names:
        if verb == "start":
            start(folder, name)
        elif verb == "stop":
            stop(folder, name)
        else:
            raise SystemExit(f"systemctl {verb}: not known")


def start(folder: Path, name: str) -> None:
    command = commands(name)[-1]
    environment = dict(os.environ)
    if name.startswith("shop-web"):
        command = [sys.executable, "-m", "tests.runbooks.traffic", str(folder / "told")]
    else:
        for setting in shlex.split(" ".join(unit(name)["Environment"])):
            key, _, value = setting.partition("=")
            environment[key] = value.replace("/run/shop-worker", f"{folder}/run/{name}")
        if "@" in name:
            # Two workers of a machine need two addresses; the second goes without.
            del environment["HEALTH_ADDRESS"]
        else:
            environment["HEALTH_ADDRESS"] = f"127.0.0.1:{os.environ['TEST_HEALTH_PORT']}"
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    (folder / f"{name}.pid").write_text(str(process.pid))


def stop(folder: Path, name: str) -> None:
    """SIGTERM to the first process; after TimeoutStopSec, SIGKILL to all (KillMode=mixed)."""
    file = folder / f"{name}.pid"
    if not file.exists():
        return
    pid = int(file.read_text())
    file.unlink()
    deadline = time.monotonic() + float(unit(name)["TimeoutStopSec"][0])
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        while time.monotonic() < deadline and is_alive(pid):
            time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


if __name__ == "__main__":
    main()
