"""Store task messages first, and later hand them to Celery's broker exactly as Celery has built them.

The stored message has everything that Celery would have sent (body, headers, properties, exchange, routing key). So
task id, eta, priority, queue, headers, links, the later tasks of a chain and the body of a chord stay the same.

Each app's `send_task` is wrapped, because every way to call a task ends there. An overridden `apply_async` would miss
`map`, `starmap`, `chunks`, a call by name and a canvas that begins with an ordinary task: Celery would send them before
COMMIT. `retry` and `replace` are sent at once, because they end with an exception that rolls the transaction back.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from inspect import signature as signature_of
from typing import Any, Final

from celery import Celery, Task, current_task, signature
from celery.backends.base import Backend
from kombu.compression import compress, decompress
from kombu.entity import Queue
from kombu.messaging import Producer
from kombu.pools import producers
from kombu.serialization import dumps, loads

from outbox.errors import UsageError

# These options say what a call does if Celery's broker is unreachable. outbox does not store these options, because it
# repeats the hand-over until Celery's broker has the message.
_OF_THE_SENDER: Final = ("retry", "retry_policy", "timeout", "confirm_timeout")
# kombu reopens a stale connection at once. If Celery's broker is down, the hand-over fails, and outbox repeats the
# hand-over from the retry queue.
_RECONNECT: Final = {"max_retries": 1, "interval_start": 0, "interval_step": 0, "interval_max": 0}


class TaskRecorder(Producer):
    """Replaces Celery's producer for one call, and keeps the task's message instead of sending it."""

    def __init__(self, app: Celery) -> None:
        # This connection is lazy: it connects only if a result backend uses it.
        super().__init__(app.connection_for_write(), auto_declare=False)  # type: ignore[no-untyped-call]
        self.recorded: dict[str, Any] | None = None

    def publish(self, body: Any, *_: Any, **options: Any) -> None:
        """Keep the first message. A second message is an event for Celery's monitoring, and is dropped."""
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
    """Base class of tasks whose messages can be stored.

    A subclass defines in `_record_now` whether to store the message of a call, and in `_store` where to store it. The
    subclass may wrap the call in `_recording`, so that a failed call rolls its transaction back.
    """

    abstract = True

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Make the app store the messages of recorded tasks from now on, also for calls by a task's name."""
        super().on_bound(app)
        record_what_waits(app)

    def apply_async(self, *args: Any, **kwargs: Any) -> Any:
        """Like Celery's `apply_async`, but stores the message if `_record_now` is true. Returns the AsyncResult."""
        # If a subclass overrides `on_bound` and does not call `RecordedTask.on_bound`, the app does not store calls
        # yet.
        record_what_waits(self.app)
        return super().apply_async(*args, **kwargs)

    def retry(self, *args: Any, **kwargs: Any) -> Any:
        """Send the retry at once: Celery's `retry` raises an exception, whose rollback would remove a stored retry."""
        with _at_once():
            return super().retry(*args, **kwargs)

    def replace(self, sig: Any, *args: Any, **kwargs: Any) -> Any:
        """Send the new task at once: Celery's `replace` raises an exception, whose rollback removes a stored task."""
        with _at_once():
            return super().replace(sig, *args, **kwargs)

    def _record_now(self, name: str) -> bool:
        raise NotImplementedError

    def _recording(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _store(self, name: str, recorded: Mapping[str, Any]) -> None:
        raise NotImplementedError


_goes_on: ContextVar[bool] = ContextVar("outbox_celery_goes_on", default=False)


@contextmanager
def _at_once() -> Iterator[None]:
    token = _goes_on.set(True)
    try:
        yield
    finally:
        _goes_on.reset(token)


def record_what_waits(app: Celery) -> None:
    """Change `app.send_task` so that it stores the calls of recorded tasks.

    Celery sends every task through `app.send_task`. A call belongs to a recorded task if the call's message contains
    the name of a recorded task. The recorded task may be the called task, the task of map, starmap or chunks, or a task
    in a chain, chord, link or link_error. If the app already stores the calls of recorded tasks, the function changes
    nothing.
    """
    send = app.send_task
    if getattr(send, "records", False):
        return

    @wraps(send)
    def send_task(name: str, *args: Any, **options: Any) -> Any:
        if args:
            bound = signature_of(send).bind(name, *args, **options).arguments
            options = {key: value for key, value in bound.items() if key not in ("name", "options")}
            options |= bound.get("options", {})
        if isinstance(options.get("producer"), TaskRecorder):
            return send(name, **options)
        is_running = _is_running(options.get("task_id"))
        task = None if is_running and _captured is None else _recorded_task(app, name, options)
        if task is None:
            return send(name, **options)
        if is_running or not task._record_now(name):
            if _captured is None:
                return send(name, **options)
            recorder = TaskRecorder(app)
            result = send(name, **{**options, "producer": recorder, "publisher": None, "connection": None})
            assert recorder.recorded is not None
            _captured.append(CapturedTask(app, recorder.recorded))
            return result
        with task._recording():
            _refuse_what_cannot_wait(app, name, options)
            recorder = TaskRecorder(app)
            # If the caller passed a producer, replace it by the recorder: the caller's producer would send the message
            # at once.
            result = send(name, **{**options, "producer": recorder, "publisher": None})
            assert recorder.recorded is not None
            task._store(name, recorder.recorded)
        return result

    send_task.records = True  # type: ignore[attr-defined]
    app.send_task = send_task


def _is_running(task_id: str | None) -> bool:
    """Whether this call retries or replaces the running task. Retry and replacement raise an exception in the task."""
    running = current_task.request.id if current_task else None
    return _goes_on.get() or (task_id is not None and task_id == running)


def _recorded_task(app: Celery, name: str, options: Mapping[str, Any]) -> RecordedTask | None:
    """Return the recorded task that a call names; None if the call names only ordinary tasks."""
    known: Any = options.get("task_type")
    if isinstance(known, RecordedTask):
        return known
    nested = [options.get(key) for key in ("chain", "chord", "link", "link_error")]
    if name in _OF_SIGNATURES:
        nested += [options.get("args"), options.get("kwargs")]
    for named in (name, *_names_in(nested)):
        if isinstance(found := _task(app, named), RecordedTask):
            return found
    if _task(app, name) is None and issubclass(app.Task, RecordedTask):
        # The task belongs to another program. If the Task class of this app is a RecordedTask, the app also stores the
        # messages of tasks that it does not know.
        unknown: RecordedTask = app.Task()
        return unknown
    return None


# Celery's own tasks that call another task. The arguments of these tasks contain the signature of the other task.
_OF_SIGNATURES: Final = ("celery.map", "celery.starmap", "celery.chunks")


def _names_in(value: Any) -> Iterator[str]:
    """Return the names of all tasks in a signature or in a list of signatures."""
    if isinstance(value, Mapping):
        if isinstance(name := value.get("task"), str):
            yield name
            options, kwargs = value.get("options") or {}, value.get("kwargs") or {}
            for key in ("chain", "chord", "link", "link_error"):
                yield from _names_in(options.get(key))
            if value.get("subtask_type"):
                # The tasks of a chain, group or chord are in the arguments `task`, `tasks`, `header` and `body`.
                for key in ("task", "tasks", "header", "body"):
                    yield from _names_in(kwargs.get(key))
        else:
            # The arguments of map and starmap contain a signature as `task`.
            yield from _names_in(value.get("task"))
    elif isinstance(value, (list, tuple)):
        for item in value:
            if isinstance(item, (Mapping, list, tuple)):
                yield from _names_in(item)
    elif isinstance(tasks := getattr(value, "tasks", None), (list, tuple)):
        yield from _names_in(tasks)


def _task(app: Celery, name: str) -> Any:
    """Return the task with this name, or None. If the name is unknown, first import the modules of the app's tasks."""
    found = app.tasks.get(name)
    if found is None and not getattr(app, "outbox_has_imported", False):
        app.outbox_has_imported = True
        app.loader.import_default_modules()
        found = app.tasks.get(name)
    return found


def _refuse_what_cannot_wait(app: Celery, name: str, options: Mapping[str, Any]) -> None:
    if options.get("connection") is not None:
        raise UsageError(
            f"the task {name} was called with connection= in a transaction. outbox stores the task's message with the "
            f"transaction and later sends it to the broker of the Celery app, not over this connection. Leave out "
            f"connection=, or call the task outside of the transaction."
        )
    # If the result backend cannot count finished tasks, Celery sends a task that polls for the chord without a time
    # limit.
    counts = type(app.backend).apply_chord is not Backend.apply_chord
    if options.get("chord") and not counts and not isinstance(app.tasks["celery.chord_unlock"], RecordedTask):
        raise UsageError(
            f"the chord of {name} cannot wait for its transaction: the result backend cannot count finished tasks, so "
            f"Celery sends its own task celery.chord_unlock before the commit. Make all tasks transactional with "
            f"Celery(…, task_cls=TransactionalTask), or use the Redis result backend."
        )


# In a test: the list that gets the calls, instead of Celery's broker.
_captured: list[CapturedTask] | None = None


@dataclass(frozen=True, slots=True)
class CapturedTask:
    """A call of a Celery task that a test has captured, so Celery's broker and its workers do not get it."""

    app: Celery
    recorded: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of the task."""
        return str(self.recorded["headers"]["task"])

    @property
    def id(self) -> str:
        """Celery's id of the call."""
        return str(self.recorded["headers"]["id"])

    @property
    def args(self) -> list[Any]:
        """The arguments of the call without names."""
        return list(self._payload()[0])

    @property
    def kwargs(self) -> dict[str, Any]:
        """The arguments of the call with names."""
        return dict(self._payload()[1])

    def run(self) -> Any:
        """Run the task in this thread, and return its result. Raises its error.

        The calls of other transactional tasks (also of its chain and links) are captured too.
        """
        args, kwargs, embedded = self._payload()
        task = _task(self.app, self.name)
        if task is None:
            raise UsageError(
                f"the task {self.name!r} is not known to the app {self.app.main!r}, so it cannot run here."
            )
        result = task.apply(
            args,
            kwargs,
            task_id=self.id,
            link=embedded.get("callbacks"),
            link_error=embedded.get("errbacks"),
            throw=True,
        )
        if chain := embedded.get("chain"):
            # Celery keeps the tasks of a chain in reverse order, and gives the result of each to the next.
            following = signature(chain[-1], app=self.app)
            following.apply_async((result.result,), chain=chain[:-1])
        return result.result

    def _payload(self) -> Any:
        body = self.recorded["body"]
        body = body if self.recorded["is_text"] else base64.b64decode(body)
        if compression := self.recorded["headers"].get("compression"):
            body = decompress(body, compression)  # type: ignore[no-untyped-call]
        return loads(body, self.recorded["content_type"], self.recorded["content_encoding"])  # type: ignore[no-untyped-call]


@contextmanager
def capturing() -> Iterator[list[CapturedTask]]:
    """Capture the calls of recorded tasks inside the block.

    A call in a transaction is captured when its message is handed over, and any other call at once.
    """
    global _captured
    before, _captured = _captured, []
    try:
        yield _captured
    finally:
        _captured = before


def hand_over(app: Celery, recorded: Mapping[str, Any]) -> None:
    """Give a stored message to Celery's broker, and return when the broker has it. Raises kombu's errors.

    The caller may repeat the call with the same message, because the task keeps its id.
    """
    if _captured is not None:
        _captured.append(CapturedTask(app, recorded))
        return
    connection = app.connection_for_write()
    if connection.transport.driver_type == "amqp":
        # Without `confirm_publish`, RabbitMQ acknowledges no message, so a broken connection may lose messages that the
        # producer has just sent.
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
    """Return the message of a call without sending it."""
    recorder = TaskRecorder(task.app)
    Task.apply_async(task, args, task_id=task_id, producer=recorder, add_to_parent=False)
    assert recorder.recorded is not None, f"the app sent the call of {task.name} past its producer"
    return recorder.recorded
