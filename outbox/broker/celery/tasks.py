"""Task messages that are written down first and handed to Celery's broker later, as Celery itself has built them.

What is written down is what Celery would have sent (body, headers, properties, exchange, routing key), so that nothing
of it can change on the way: task id, eta, priority, queue, headers, links, the rest of a chain, the body of a chord.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from celery import Celery, Task, current_task
from celery.backends.base import Backend
from kombu.compression import compress
from kombu.entity import Queue
from kombu.messaging import Producer
from kombu.pools import producers
from kombu.serialization import dumps

from outbox.errors import UsageError

# How the sender meets a broker that is away. What is handed over is tried again until it is there.
_OF_THE_SENDER: Final = ("retry", "retry_policy", "timeout", "confirm_timeout")
# A connection that has gone stale is opened again at once; a broker that is away is the retry queue's business.
_RECONNECT: Final = {"max_retries": 1, "interval_start": 0, "interval_step": 0, "interval_max": 0}


class Recorder(Producer):
    """Stands in for the producer of one call: keeps the task's message instead of sending it."""

    def __init__(self, app: Celery) -> None:
        # Lazy: nothing is connected unless a result backend insists.
        super().__init__(app.connection_for_write(), auto_declare=False)  # type: ignore[no-untyped-call]
        self.recorded: dict[str, Any] | None = None

    def publish(self, body: Any, *_: Any, **options: Any) -> None:
        """Keep the first message: an event of Celery's monitoring may follow, which would be early."""
        if self.recorded is not None:
            return
        content_type, content_encoding, payload = dumps(  # type: ignore[no-untyped-call]
            body, serializer=options.pop("serializer", None)
        )
        headers = dict(options.pop("headers", None) or {})
        if compression := options.pop("compression", None):
            payload, headers["compression"] = compress(payload, compression)  # type: ignore[no-untyped-call]
        is_text = isinstance(payload, str)
        exchange, declare = options.pop("exchange", None), options.pop("declare", None)
        self.recorded = {
            "body": payload if is_text else base64.b64encode(payload).decode(),
            "is_text": is_text,
            "content_type": content_type,
            "content_encoding": content_encoding,
            "headers": headers,
            "exchange": getattr(exchange, "name", exchange),
            "routing_key": options.pop("routing_key", None),
            "queues": [entity.name for entity in declare or () if isinstance(entity, Queue)],
            "properties": {name: value for name, value in options.items() if name not in _OF_THE_SENDER},
        }


class RecordedTask(Task):  # type: ignore[misc]
    """Base of tasks whose messages can be written down. `_record_now` and `_store` say when and where.

    `_recording` surrounds it, so that a call that fails can take its transaction along.
    """

    abstract = True

    def apply_async(
        self, args: Any = None, kwargs: Any = None, task_id: str | None = None, producer: Any = None, **options: Any
    ) -> Any:
        """Like Celery's; written down where `_record_now` says so. Returns the AsyncResult of the task to come."""
        app = self._get_app()
        if app.conf.task_always_eager or self._goes_on(task_id, options) or not self._record_now():
            return super().apply_async(args, kwargs, task_id=task_id, producer=producer, **options)
        with self._recording():
            if options.get("chord"):
                self._refuse_early_unlock(app)
            recorder = Recorder(app)
            result = super().apply_async(args, kwargs, task_id=task_id, producer=recorder, **options)
            assert recorder.recorded is not None
            self._store(recorder.recorded)
        return result

    def _record_now(self) -> bool:
        raise NotImplementedError

    def _recording(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _store(self, recorded: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def _goes_on(self, task_id: str | None, options: Mapping[str, Any]) -> bool:
        """Whether this is a retry or a replacement of the task that runs, which leaves its block by an exception.

        Written down with the transaction, it would be rolled back with it.
        """
        running = current_task.request.id if current_task else None
        return bool(options.get("retries")) or (task_id is not None and task_id == running)

    def _refuse_early_unlock(self, app: Celery) -> None:
        """Without a counting backend Celery has already sent a task that waits for the chord, for ever if need be."""
        counts = type(app.backend).apply_chord is not Backend.apply_chord
        if not counts and not isinstance(app.tasks["celery.chord_unlock"], RecordedTask):
            raise UsageError(
                f"the chord of {self.name} cannot wait for its transaction: the result backend does not count, so that "
                f"Celery polls by a task of its own, celery.chord_unlock. Make all tasks transactional, "
                f"Celery(…, task_cls=TransactionalTask), or use the Redis result backend."
            )


def hand_over(app: Celery, recorded: Mapping[str, Any]) -> None:
    """Give a written-down message to Celery's broker, and return when the broker has it. Raises what kombu raises.

    May be called again with the same message: the task's id is the same.
    """
    connection = app.connection_for_write()
    if connection.transport.driver_type == "amqp":
        # Without it RabbitMQ acknowledges nothing, and what was in flight when the connection broke is lost.
        options = {**(app.conf.broker_transport_options or {}), "confirm_publish": True}
        connection = app.connection_for_write(transport_options=options)
    known = app.amqp.queues
    with producers[connection].acquire(block=True) as producer:
        producer.publish(
            recorded["body"] if recorded["is_text"] else base64.b64decode(recorded["body"]),
            content_type=recorded["content_type"],
            content_encoding=recorded["content_encoding"],
            headers=recorded["headers"],
            exchange=recorded["exchange"],
            routing_key=recorded["routing_key"],
            declare=[known[name] for name in recorded["queues"] if name in known or known.create_missing],
            retry=True,
            retry_policy=_RECONNECT,
            **recorded["properties"],
        )


def record(task: Task, args: Any, *, task_id: str) -> Mapping[str, Any]:
    """The message of a call, not sent."""
    recorder = Recorder(task._get_app())
    Task.apply_async(task, args, task_id=task_id, producer=recorder, add_to_parent=False)
    assert recorder.recorded is not None
    return recorder.recorded
