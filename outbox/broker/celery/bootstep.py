"""`celery -A app worker --outbox`: the worker supervises the broker's and the consumers' processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

import click
from celery import Celery, bootsteps

from outbox.broker.supervisor import ChildSpec, Supervisor

_CONF_KEY: Final = "outbox_children"


def install(app: Celery, children: Callable[[], Sequence[ChildSpec]]) -> None:
    """Give a Celery app the worker option `--outbox`; `children` is asked for when such a worker starts."""
    app.user_options["worker"].add(
        click.Option(["--outbox"], is_flag=True, help="Supervise the outbox broker and consumer processes.")
    )
    app.steps["worker"].add(OutboxStep)
    app.conf[_CONF_KEY] = children


class OutboxStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Starts a Supervisor with the worker, if the worker was given `--outbox`, and drains it with the worker."""

    requires: ClassVar[set[str]] = {"celery.worker.components:Pool"}

    def __init__(self, worker: Any, outbox: bool = False, **options: Any) -> None:
        super().__init__(worker, **options)
        self.enabled = outbox
        self.supervisor: Supervisor | None = None

    def start(self, worker: Any) -> None:
        """Start the children after the pool was forked, so that no pool process inherits their handles."""
        self.supervisor = Supervisor(worker.app.conf[_CONF_KEY]())
        self.supervisor.start()

    def stop(self, worker: Any) -> None:
        """Drain the children."""
        if self.supervisor is not None:
            self.supervisor.stop()
            self.supervisor = None

    terminate = stop
