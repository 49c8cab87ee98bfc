"""With databases of its own, as deploy/settings.py reads them, the sample starts no server and makes no database."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.sample.conftest import ROOT

PROGRAM = """
import sys
from sample_project.manage import main

sys.argv = ["manage", "check"]
main()
import sample_project.celery
import sample_project.wsgi
from django.conf import settings

print(*(settings.DATABASES[alias]["NAME"] for alias in ("default", "broker")), settings.OUTBOX["LISTEN_URL"])
"""


def test_no_server_is_started_for_databases_that_the_environment_names(tmp_path: Path) -> None:
    nowhere = "postgresql://nobody@127.0.0.1:9"
    environment = {
        **os.environ,
        "SAMPLE_PATH": "two-phase",
        "OUTBOX_DEMO_DIR": str(tmp_path),
        # Joining this server would fail.
        "OUTBOX_POSTGRES_URL": nowhere,
        "APPLICATION_URL": f"{nowhere}/shop",
        "OUTBOX_BROKER_URL": f"{nowhere}/shop_broker",
        "LISTEN_URL": f"{nowhere}/direct",
        "SAMPLE_CELERY_BROKER": "memory://",
    }
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"shop shop_broker {nowhere}/direct"
    assert list(tmp_path.iterdir()) == []
