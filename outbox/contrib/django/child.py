"""`python -m outbox.contrib.django.child broker|consumer|monitor`: one supervised process of a Django project.

Runs until SIGTERM or SIGINT, or until the supervisor that started it is gone; then drains and ends.
Exit codes: 0 drained, 2 wrong usage or configuration.
"""

from __future__ import annotations

import argparse
import logging
import sys
import threading

import django

from outbox.broker.consumer.runtime import tune_garbage_collector
from outbox.broker.supervisor import stop_on_signals, stop_with_parent
from outbox.contrib.django.workers import run_broker_role, run_consumer_role, run_monitor_role
from outbox.errors import OutboxError
from outbox.safe_text import for_people

logger = logging.getLogger("outbox.contrib.django.child")


def main(arguments: list[str] | None = None) -> int:
    """Set up Django and run the role. DJANGO_SETTINGS_MODULE names the settings."""
    parser = argparse.ArgumentParser(prog="python -m outbox.contrib.django.child", description=__doc__)
    parser.add_argument("role", choices=["broker", "consumer", "monitor"])
    parser.add_argument("--group", action="append", default=[], help="consumer: only this group (repeatable)")
    options = parser.parse_args(arguments)
    stop = threading.Event()
    stop_on_signals(stop)
    stop_with_parent(stop)
    try:
        django.setup()
        run_role(options.role, stop, groups=options.group)
    except OutboxError as error:
        logger.error("%s", error)
        print(f"outbox {options.role}: {for_people(str(error))}", file=sys.stderr)
        return 2
    return 0


def run_role(role: str, stop: threading.Event, *, groups: list[str]) -> None:
    """Run one role of a worker in this process until `stop`."""
    logger.info("%s starts", role)
    if role == "broker":
        run_broker_role(stop)
    elif role == "monitor":
        run_monitor_role(stop)
    else:
        tune_garbage_collector()
        run_consumer_role(stop, groups=groups)
    logger.info("%s drained and ends", role)


if __name__ == "__main__":
    sys.exit(main())
