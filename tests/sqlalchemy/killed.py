"""`python -m tests.sqlalchemy.killed URL`: for each driver and step a process that publishes, and dies at this step.

The number of the order names both. The processes are forked, so that the libraries are imported once.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, Final

from sqlalchemy import Engine, event
from sqlalchemy.orm import Session

from outbox.contrib.sqlalchemy import publish
from tests.sqlalchemy.support import DRIVERS, Order, in_session

# The step -> whether the transaction is committed before.
STEPS: Final = {"publish": False, "commit": False, "notify": True, "after": True}


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run(url: str, driver: str, step: str) -> None:
    """Publish about an order, and die at the step: after `publish`, before COMMIT, before NOTIFY, after all."""

    def prepare(engine: Engine) -> None:
        @event.listens_for(engine, "commit")
        def before_commit(connection: Any) -> None:
            if step == "commit":
                die()

        @event.listens_for(engine, "before_cursor_execute")
        def before_statement(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
            if step == "notify" and statement.startswith("NOTIFY"):
                die()

    def work(session: Session) -> None:
        number = f"{driver} {step}"
        session.add(Order(number=number))
        session.flush()
        publish(session, "orders", {"number": number})
        if step == "publish":
            die()
        session.commit()
        die()

    in_session(url, driver, work, prepare)


def main() -> None:
    for driver in DRIVERS:
        for step in STEPS:
            if (child := os.fork()) == 0:
                run(sys.argv[1], driver, step)
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, (driver, step)


if __name__ == "__main__":
    main()
