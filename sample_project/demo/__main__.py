"""Run the demo. The exit code is 0 if every figure was right, 1 if not or on a failure, 130 if interrupted."""

from __future__ import annotations

import signal
import sys
from types import FrameType

from outbox.errors import OutboxError
from sample_project import server
from sample_project.demo import options
from sample_project.demo.display import Display
from sample_project.demo.processes import DemoFailed, exclusive, tail
from sample_project.demo.scenario import run


def main() -> int:
    """Parse the options, run, return the exit code."""
    chosen = options.parse()
    display = Display(chosen.orders)
    # SIGINT too: a shell that starts this in the background makes it ignore SIGINT.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        with exclusive(server.directory()):
            run(chosen, display, server.directory())
    except DemoFailed as failure:
        display.failure(str(failure), str(failure.log), tail(failure.log) if failure.log else [])
        return 1
    except OutboxError as failure:
        display.failure(str(failure), "", [])
        return 1
    except KeyboardInterrupt:
        display.close()
        display.note("interrupted; all processes were stopped")
        return 130
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, so that all processes are stopped on the way out."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
