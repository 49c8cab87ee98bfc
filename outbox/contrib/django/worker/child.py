"""`python -m outbox.contrib.django.worker.child ROLE [ROLE]`: one supervised process of a Django project.

The process runs until it gets SIGTERM or SIGINT, or until its supervisor has ended. Then the process drains and ends.
The exit code is 0 if the process has drained, 1 if the process has failed, 2 for wrong usage or configuration, or 3 if
handlers hang.
"""

from __future__ import annotations

import argparse
import logging
import sys
import threading
from collections.abc import Sequence
from typing import Final

import django

from outbox.broker.consumer.runtime import tune_garbage_collector
from outbox.broker.process_log import write_log
from outbox.broker.supervisor import HUNG_EXIT_CODE, end_within, stop_on_signals, stop_with_parent
from outbox.contrib.django.operations import signals
from outbox.contrib.django.worker import workers
from outbox.contrib.django.worker.roles import SHARED_LEAD, Role, refuse_unknown
from outbox.errors import HandlersHung, OutboxError
from outbox.utils.safe_text import printable

# If handlers hang, the process is killed after this number of seconds.
_HUNG_SECONDS: Final = 5.0

logger = logging.getLogger("outbox.contrib.django.worker.child")


def main(arguments: list[str] | None = None) -> int:
    """Set up Django and run the roles. DJANGO_SETTINGS_MODULE names the settings."""
    parser = argparse.ArgumentParser(prog="python -m outbox.contrib.django.worker.child", description=__doc__)
    # Parts add their roles when Django is set up.
    parser.add_argument("roles", nargs="+", metavar="ROLE", help=", ".join(Role))
    parser.add_argument("--group", action="append", default=[], help="consumer: only this group (repeatable)")
    parser.add_argument(
        SHARED_LEAD,
        action="store_true",
        dest="shared_lead",
        help="the consumer process is the leader, and the broker process of the worker is the standby",
    )
    options = parser.parse_args(arguments)
    if len(options.roles) > 1 and not {Role.BROKER, Role.CHECK} >= set(options.roles):
        parser.error("only the roles broker and check can run in one process: start one process for each other role")
    name = "+".join(options.roles)
    stop = threading.Event()
    stop_on_signals(stop)
    stop_with_parent(stop)
    try:
        try:
            # Django configures the logging of the project. If its set-up fails, the worker still has a log.
            django.setup()
        finally:
            write_log(name)
        run_roles(options.roles, stop, groups=options.group, shared_lead=options.shared_lead)
    except HandlersHung as error:
        logger.error("%s", error)
        end_within(_HUNG_SECONDS, HUNG_EXIT_CODE)
        return HUNG_EXIT_CODE
    except OutboxError as error:
        logger.error("%s cannot work: %s", name, error)
        return 2
    except Exception as error:
        logger.error("%s failed", name, exc_info=printable(error))
        return 1
    return 0


def run_roles(roles: Sequence[str], stop: threading.Event, *, groups: Sequence[str], shared_lead: bool = False) -> None:
    """Run roles of a worker in this process until `stop` is set.

    `shared_lead` is True if the option `SHARED_LEAD` was given.
    """
    refuse_unknown(roles)
    name = " and ".join(roles)
    logger.info("%s starts", name)
    with signals.working(roles):
        if Role.CONSUMER in roles:
            tune_garbage_collector()
        workers.run_roles(roles, stop, names=groups, shared_lead=shared_lead)
    logger.info("%s drained and ends", name)


if __name__ == "__main__":
    sys.exit(main())
