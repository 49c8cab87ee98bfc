"""Receivers that write each signal into a file, as one line of JSON."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from django.apps import AppConfig

from outbox.contrib.django import signals

VARIABLE = "TEST_SIGNALS"


class SignalReceivers(AppConfig):
    name = "tests.django.receivers"

    def ready(self) -> None:
        for name in signals.__all__:
            signal = getattr(signals, name)
            signal.connect(_raising, weak=False, dispatch_uid=f"raising {name}")
            signal.connect(_writer(name), weak=False, dispatch_uid=f"writing {name}")
        if os.environ.get("TEST_HANGING"):
            signals.message_dead_lettered.connect(_hanging, weak=False)


def _raising(**arguments: Any) -> None:
    raise LookupError("this receiver is broken")


def _hanging(**arguments: Any) -> None:
    time.sleep(3600)


def _writer(name: str) -> Any:
    def write(*, signal: Any, sender: Any, **arguments: Any) -> None:
        thread = threading.current_thread().name
        said = {key: str(value) for key, value in arguments.items()}
        line = json.dumps({"signal": name, "thread": thread, "pid": os.getpid(), **said})
        with Path(os.environ[VARIABLE]).open("a") as file:
            file.write(line + "\n")

    return write
