"""The ways that are compared: which peer, in which environment, with which worker."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.peers.environments import missing


@dataclass(frozen=True)
class Way:
    """`worker` is what follows the interpreter; `checkout` a folder whose `outbox` is taken in place of this one's."""

    name: str
    peer: str
    environment: str
    worker: tuple[str, ...]
    inbox: bool = False
    two_phase: bool = False
    program: str = ""
    checkout: Path | None = None

    def left_out(self) -> str:
        """Why it cannot be run here; empty when it can."""
        if missing(self.environment):
            return f"there is no environment {self.environment}; python -m benchmarks.web_peers --install makes it"
        if self.program and shutil.which(self.program) is None:
            return f"{self.program} is not on the PATH"
        return ""


# As `manage.py COMMAND`, with the settings in the environment.
_OUTBOX = ("-m", "django", "outbox_worker")
_PROCRASTINATE = ("-m", "django", "procrastinate", "worker")
# One handler process, as all others have.
_CELERY = ("-m", "celery", "-A", "benchmarks.peers.celery_redis.app", "worker", "--concurrency", "1", "-l", "ERROR")

ATOMIC = Way("this project, atomic", "this_project", "", _OUTBOX)
TWO_PHASE = Way("this project, two-phase", "this_project", "", _OUTBOX, two_phase=True)
RELIABLE = Way("django-reliable-outbox", "reliable", "django-reliable-outbox", _OUTBOX)
RELIABLE_INBOX = replace(RELIABLE, name=f"{RELIABLE.name}, inbox", inbox=True)
ATOMIC_INBOX, TWO_PHASE_INBOX = (replace(way, name=f"{way.name}, inbox", inbox=True) for way in (ATOMIC, TWO_PHASE))
OURS = (ATOMIC, ATOMIC_INBOX, TWO_PHASE, TWO_PHASE_INBOX)
# The least work of any outbox on each path, and of a log with order, inbox and offsets: what limits the goals.
FLOOR = Way("the least work, atomic", "floor", "", ("-m", "benchmarks.peers.floor.worker"), inbox=True)
FLOOR_TWO_PHASE = replace(FLOOR, name="the least work, two-phase", two_phase=True)
FLOOR_LOG = Way("the least log, atomic", "floor_log", "", ("-m", "benchmarks.peers.floor_log.worker"), inbox=True)
FLOOR_LOG_TWO_PHASE = replace(FLOOR_LOG, name="the least log, two-phase", two_phase=True)
FLOORS = (FLOOR, FLOOR_TWO_PHASE, FLOOR_LOG, FLOOR_LOG_TWO_PHASE)
# Only its web process is run: what a web process has without outbox.
PLAIN_DJANGO = Way("Django without outbox", "plain_django", "", ())
PEERS = (
    RELIABLE,
    RELIABLE_INBOX,
    Way("procrastinate", "procrastinate_tasks", "procrastinate", _PROCRASTINATE),
    Way("pgmq, plain psycopg", "pgmq_queue", "pgmq", ("-m", "benchmarks.peers.pgmq_queue.worker")),
    Way("Celery + Redis, on_commit", "celery_redis", "celery", _CELERY, program="redis-server"),
)
RAW = Way("raw psycopg, NOTIFY", "raw", "", ("-m", "benchmarks.peers.raw.worker"))
EVERY = (*OURS, *PEERS, *FLOORS, RAW)


def before(way: Way, checkout: Path) -> Way:
    """The same with the code of another checkout."""
    return replace(way, name=f"{way.name}, before", checkout=checkout)
