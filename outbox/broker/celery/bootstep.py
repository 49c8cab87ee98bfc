"""`celery -A app worker --outbox`: the worker supervises the processes of the broker and the consumers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, Protocol

import click
from celery import Celery, bootsteps, signals
from celery.utils.nodenames import node_format

from outbox.broker.process_log import told_to_children
from outbox.broker.supervisor import Supervisor

_CONF_KEY: Final = "outbox_supervisor"
_ROLES_KEY: Final = "outbox_known_roles"
# psycopg waits with select.poll, and eventlet removes this function. So outbox cannot work in a process with eventlet.
_REFUSED_POOLS: Final = ("eventlet",)


class MakeSupervisor(Protocol):
    """Makes the supervisor for processes with the given roles. An empty `roles` means all roles."""

    def __call__(self, roles: Sequence[str], *, environment: Mapping[str, str]) -> Supervisor: ...


def install(app: Celery, make_supervisor: MakeSupervisor, *, roles: Callable[[], Sequence[str]]) -> None:
    """Give a Celery app the worker options `--outbox` and `--outbox-roles`. A second call of `install` changes nothing.

    A worker with `--outbox` calls `make_supervisor` when it starts. `roles` returns the values that `--outbox-roles`
    accepts. It is called when the worker starts, because parts add roles when Django is set up.
    """
    if OutboxStep in app.steps["worker"]:
        return
    app.user_options["worker"].update(_options())
    app.steps["worker"].add(OutboxStep)
    app.conf[_CONF_KEY] = make_supervisor
    app.conf[_ROLES_KEY] = roles


def flush_at_end(flush: Callable[[], object]) -> None:
    """Call `flush` when a process of a worker's pool ends, because such a process skips Python's atexit handlers."""
    signals.worker_process_shutdown.connect(lambda **_: flush(), weak=False, dispatch_uid="outbox.flush")


def _options() -> list[click.Option]:
    def parse(context: click.Context, parameter: click.Parameter, value: str) -> list[str]:
        return [role.strip() for role in value.split(",") if role.strip()]

    return [
        click.Option(["--outbox"], is_flag=True, help="Supervise the processes of outbox."),
        click.Option(
            ["--outbox-roles"],
            default="",
            callback=parse,
            help="Start only these roles (separated by commas), for example broker,check. Implies --outbox.",
        ),
    ]


class OutboxStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Starts a Supervisor if the worker has the option `--outbox`, and drains it when the worker stops."""

    requires: ClassVar[set[str]] = {"celery.worker.components:Pool"}

    def __init__(self, worker: Any, outbox: bool = False, outbox_roles: Sequence[str] = (), **options: Any) -> None:
        super().__init__(worker, **options)
        _refuse_pool(worker)
        known = worker.app.conf[_ROLES_KEY]()
        if unknown := [role for role in outbox_roles if role not in known]:
            raise click.UsageError(f"there is no role {', '.join(unknown)}; choose from {', '.join(known)}.")
        self.enabled = outbox or bool(outbox_roles)
        self.roles = outbox_roles
        self.supervisor: Supervisor | None = None

    def start(self, worker: Any) -> None:
        """Start the child processes after Celery has forked its pool, so that the pool inherits no child handles."""
        file = node_format(worker.logfile, worker.hostname) if worker.logfile else None
        log = told_to_children(level=worker.loglevel, file=file)
        self.supervisor = worker.app.conf[_CONF_KEY](self.roles, environment=log)
        signals.worker_shutting_down.connect(self._hurry, weak=False)
        self.supervisor.start()

    def close(self, worker: Any) -> None:
        """Let the child processes drain while the worker finishes its tasks."""
        if self.supervisor is not None:
            self.supervisor.drain()

    def stop(self, worker: Any) -> None:
        """Wait until the child processes have ended."""
        if self.supervisor is not None:
            self.supervisor.stop()
            self.supervisor = None

    def terminate(self, worker: Any) -> None:
        """Kill the child processes at once, because a cold shutdown does not wait."""
        if self.supervisor is not None:
            self.supervisor.kill()
            self.stop(worker)

    def _hurry(self, how: str = "", **_: Any) -> None:
        """Handle a second Ctrl-C or SIGQUIT, also while the child processes drain.

        This method runs in a signal handler, so on the main thread, which may already hold the supervisor's lock. To
        avoid a deadlock, another thread kills the child processes.
        """
        if how == "Cold" and self.supervisor is not None:
            threading.Thread(target=self.supervisor.kill, name="outbox-hurry", daemon=True).start()


def _refuse_pool(worker: Any) -> None:
    pool = worker.pool_cls if isinstance(worker.pool_cls, str) else worker.pool_cls.__module__
    if (name := pool.rpartition(".")[2]) in _REFUSED_POOLS:
        raise click.ClickException(
            f"outbox cannot work in the pool {name!r}, which removes select.poll from the PostgreSQL driver: every "
            f"publish would fail. Start the worker with --pool prefork, threads, solo or gevent."
        )
