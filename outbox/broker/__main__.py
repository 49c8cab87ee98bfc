"""`python -m outbox.broker` runs one broker process without Django, until SIGTERM or SIGINT.

--database or $OUTBOX_BROKER_URL names the broker's database. Any number of broker processes may run on one database: a
lease decides which process leads.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading

from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.process import run_broker
from outbox.broker.process_log import write_log
from outbox.broker.supervisor import stop_on_signals, stop_with_parent
from outbox.errors import OutboxError
from outbox.utils import faults
from outbox.utils.safe_text import for_people


def main(arguments: list[str] | None = None) -> int:
    """Run the broker process until SIGTERM or SIGINT. Return 0 after a clean stop, and 2 after wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m outbox.broker", description=__doc__)
    parser.add_argument(
        "--database", default=os.environ.get("OUTBOX_BROKER_URL"), help="libpq URL of the broker's database"
    )
    parser.add_argument("--schema", default="outbox", help="schema of the broker's tables (default: outbox)")
    options = parser.parse_args(arguments)
    if not options.database:
        parser.error("name the broker's database by --database or $OUTBOX_BROKER_URL")
    write_log("broker")
    stop = threading.Event()
    stop_on_signals(stop)
    stop_with_parent(stop)
    try:
        faults.check_environment()
        run_broker(BrokerDatabase(conninfo=options.database, schema=options.schema), stop)
    except OutboxError as error:
        print(f"outbox broker: {for_people(str(error))}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
