"""Run the demo and say by the exit code whether every figure was right: 0 yes, 1 no or a failure, 130 interrupted."""

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
    """Parse, run, tell."""
    chosen = options.parse()
    display = Display(chosen.orders)
    # SIGINT too: a shell that starts this in the background has it ignored.
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
        display.note("interrupted; everything was stopped")
        return 130
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End like Ctrl-C, so that everything is stopped on the way out."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
