"""Test brokers for applications, and `drain`, which runs the project's subscribers.

The in-memory broker works in any test. A message is published when the atomic blocks of the code under test have ended,
even inside the transaction that a TestCase wraps around the test. A test may use `captureOnCommitCallbacks`, but does
not need it:

    class PayTests(OutboxTestMixin, TestCase):
        def test_pay(self):
            pay(order)
            self.assertEqual([m.key for m in self.outbox.messages("order-paid")], [str(order.pk)])
            self.outbox.drain()

To test both paths, check-back, order or handler threads, use a real broker in the broker's test database:

    class PayForReal(OutboxBrokerTestMixin, TransactionTestCase):
        databases = {"default", "broker"}

With pytest, the fixtures `outbox` and `outbox_broker` (outbox.pytest_plugin) provide the same two brokers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, cast

from outbox.broker.database.executor import Executor
from outbox.broker.log.topics import declare_topics
from outbox.broker.operations import deletion
from outbox.broker.schema.install import install
from outbox.codec import UnreadBody
from outbox.contrib.django.database.aliases import broker_database, on_broker
from outbox.contrib.django.database.django_internals import running_tests
from outbox.contrib.django.engine.broker import (
    flush,
    get_broker,
    get_codecs,
    get_engine,
    reset_broker,
    use_broker,
)
from outbox.contrib.django.settings.conf import forced, get_settings
from outbox.contrib.django.subscribers import inbox
from outbox.contrib.django.subscribers.again import HandledCall, deliver_again
from outbox.contrib.django.subscribers.middleware import with_middleware
from outbox.contrib.django.subscribers.registry import autodiscover, subscriptions
from outbox.contrib.django.worker.drain import drain, queue_messages
from outbox.errors import UsageError
from outbox.memory import InMemoryBroker
from outbox.message import Delivery, Message
from outbox.ports import AnyHandler, Disposition
from outbox.subscription import Subscription

if TYPE_CHECKING:
    from outbox.broker.celery.tasks import CapturedTask


class OutboxForTests(ABC):
    """The interface of a broker in a test: the in-memory broker or a real one."""

    def __init__(self, groups: Sequence[str] = ()) -> None:
        """Let `drain` run only the subscribers of `groups`, or all subscribers if `groups` is empty."""
        self._groups = groups
        self._errors: list[Exception] = []
        self._handled: list[HandledCall] = []
        self._tasks = _tasks
        autodiscover()

    @abstractmethod
    def messages(self, topic: str) -> list[Message]:
        """Return the messages of committed transactions that subscribers of the topic can see, queue by queue."""

    def bodies(self, topic: str) -> list[Any]:
        """Return the decoded bodies of the messages that `messages` returns."""
        decoded = (get_codecs().decode(item.content_type, item.body) for item in self.messages(topic))
        return [body.read() if isinstance(body, UnreadBody) else body for body in decoded]

    def drain(self, *, raise_errors: bool = True) -> int:
        """Run subscribers until no message can be delivered now, and return the number of deliveries.

        Raises the first error of a handler. If `raise_errors` is False, this method raises no error, and failed
        messages wait for their retry.
        """
        total = 0
        self._errors.clear()
        with self._recording():
            while count := self._drain_once():
                total += count
                if self._errors and raise_errors:
                    break
        if self._errors and raise_errors:
            raise self._errors[0]
        return total

    @property
    def tasks(self) -> list[CapturedTask]:
        """The calls of transactional Celery tasks, and of `@subscriber_task`, that Celery's broker would have got.

        A call in a transaction is here after `drain`. `tasks[0].run()` runs one in this process.
        """
        return list(self._tasks)

    def run_tasks(self) -> int:
        """Run the captured tasks, with those that they call, and return their number. Raises the error of a task."""
        count = 0
        while self._tasks:
            self._tasks.pop(0).run()
            count += 1
        return count

    def redeliver(self, *, bypass_inbox: bool = False) -> int:
        """Deliver every message that `drain` has handled once more, and return how many messages a handler has got.

        The inbox skips messages that are handled, so only handlers without an inbox get them. With `bypass_inbox`, all
        handlers get them, as after a reset of their group: steps of handlers with effects="outside" run again, too.
        Raises the first error of a handler.
        """
        return deliver_again(self._handled, bypass_inbox=bypass_inbox)

    @abstractmethod
    def _drain_once(self) -> int:
        """Decide half messages, then run subscribers once. Return the number of deliveries."""

    @abstractmethod
    def reset(self) -> None:
        """Delete all messages, retries and positions."""

    @contextmanager
    def _recording(self) -> Iterator[None]:
        before, inbox.results_listener = inbox.results_listener, self._record
        try:
            yield
        finally:
            inbox.results_listener = before

    def _record(
        self,
        subscription: Subscription,
        handler: AnyHandler,
        deliveries: Sequence[Delivery],
        results: Sequence[object],
    ) -> None:
        self._errors += [result for result in results if isinstance(result, Exception)]
        handled = [one for one, result in zip(deliveries, results, strict=False) if result is Disposition.HANDLED]
        calls = [handled] if subscription.batch > 1 else [[one] for one in handled]
        self._handled += [HandledCall(subscription, handler, call) for call in calls if call]


class InMemoryOutbox(OutboxForTests):
    """An in-memory broker for tests. `broker.advance(seconds)` moves the broker's clock forward."""

    def __init__(self, groups: Sequence[str] = ()) -> None:
        super().__init__(groups)
        self._broker: InMemoryBroker | None = None
        self.reset()

    @property
    def broker(self) -> InMemoryBroker:
        """The broker. If a test has replaced settings.OUTBOX, it is a new one with the same subscribers."""
        current = cast(InMemoryBroker, get_broker())
        if current is not self._broker:
            self._broker = current
            self._subscribe(current)
        return current

    def _subscribe(self, broker: InMemoryBroker) -> None:
        for subscription, handler in subscriptions(groups=self._groups):
            broker.subscribe(subscription, with_middleware(handler))

    def reset(self) -> None:
        """Replace the broker by a new in-memory broker."""
        self._handled.clear()
        self._tasks.clear()
        reset_broker()
        _ = self.broker

    def saved(self) -> Callable[[], None]:
        """Return a function that brings back the present state: messages, positions and captured tasks."""
        get_engine().decide_ended()
        kept, handled, tasks = self.broker.copy(), list(self._handled), list(self._tasks)

        def bring_back() -> None:
            self._handled[:], self._tasks[:] = handled, tasks
            self._errors.clear()
            self._broker = kept.copy()
            use_broker(self._broker)

        return bring_back

    def messages(self, topic: str) -> list[Message]:
        get_engine().decide_ended()
        return self.broker.visible(topic)

    def _drain_once(self) -> int:
        get_engine().decide_ended()
        # A test may have registered a subscriber since the broker began.
        self._subscribe(self.broker)
        return self.broker.drain()


class BrokerOutbox(OutboxForTests):
    """A real broker in the broker's test database.

    Handlers run in threads, in their own transactions, as in a worker.
    """

    def __init__(self, groups: Sequence[str] = ()) -> None:
        super().__init__(groups)
        self.reset()

    def reset(self) -> None:
        """Empty the broker's test database and declare the topics of the settings again."""
        if not running_tests():
            raise UsageError(
                "reset() removes all messages of the broker, so it works only in tests, on a test database."
            )
        self._handled.clear()
        self._tasks.clear()
        settings = get_settings()
        flush()
        with broker_database(settings).connect(name="outbox-tests", direct=True) as connection:
            install(connection, settings.schema)
        self.empty()

    def empty(self) -> None:
        """Remove all messages and groups from the broker."""
        settings = get_settings()
        with broker_database(settings).connect(name="outbox-tests", direct=True) as connection:
            run = Executor(connection, settings.schema)
            deletion.empty(run)
            declare_topics(run, [declared.topic for declared in settings.topics.values()])
        # Rebuild the broker of this process, because the topics in its cache were deleted.
        reset_broker()

    def messages(self, topic: str) -> list[Message]:
        queue_messages()
        return on_broker(deletion.visible, topic)

    def _drain_once(self) -> int:
        if not subscriptions(groups=self._groups):
            queue_messages()
            return 0
        counts = drain(groups=self._groups)
        return counts.handled + counts.failed


@contextmanager
def in_memory_outbox(*, groups: Sequence[str] = (), **settings: Any) -> Iterator[InMemoryOutbox]:
    """Use a new in-memory broker inside the block, with the project's subscribers.

    The parameter `settings` contains further keys of OUTBOX.
    """
    with changed_settings({**settings, "IN_MEMORY": True}):
        yield InMemoryOutbox(groups)


@contextmanager
def broker_outbox(*, groups: Sequence[str] = (), **settings: Any) -> Iterator[BrokerOutbox]:
    """Inside the block, use a real broker in the broker's test database, which is emptied first.

    The parameters are the same as for `in_memory_outbox`.

    Raises ConfigurationError if the broker's alias is not among the databases of the running test.
    """
    with changed_settings({**settings, "IN_MEMORY": False}):
        yield BrokerOutbox(groups)


@contextmanager
def changed_settings(keys: dict[str, Any]) -> Iterator[None]:
    """In the block, OUTBOX has these keys too, and the process has a broker of its own."""
    with ExitStack() as stack:
        stack.enter_context(forced(keys))
        stack.enter_context(_capturing_tasks())
        reset_broker()
        stack.callback(reset_broker)
        stack.callback(flush)
        yield


_tasks: list[CapturedTask] = []


@contextmanager
def _capturing_tasks() -> Iterator[None]:
    """Keep the calls of Celery tasks in this process: a worker of the developer would run them on other databases."""
    global _tasks
    if find_spec("celery") is None:
        yield
        return
    from outbox.broker.celery.tasks import capturing

    before = _tasks
    with capturing() as _tasks:
        try:
            yield
        finally:
            _tasks = before


class OutboxTestMixin:
    """Gives every test of a TestCase or TransactionTestCase an in-memory broker as `self.outbox`.

    What `setUpClass` and `setUpTestData` publish is there (`cls.outbox`) when the `setUp` of a test begins, like the
    rows that they have stored.
    """

    outbox: ClassVar[InMemoryOutbox]
    # None before the first test of the class, and in a class that is skipped.
    _bring_back: ClassVar[Callable[[], None] | None] = None

    @classmethod
    def setUpClass(cls) -> None:
        cls._bring_back = None
        cls.outbox = cls.enterClassContext(in_memory_outbox())  # type: ignore[attr-defined]
        super().setUpClass()  # type: ignore[misc]

    def run(self, result: Any = None) -> Any:
        self._begin()
        return super().run(result)  # type: ignore[misc]

    def debug(self) -> None:
        self._begin()
        super().debug()  # type: ignore[misc]

    def _begin(self) -> None:
        kind = type(self)
        if "outbox" not in vars(kind):
            return
        if kind._bring_back is None:
            kind._bring_back = staticmethod(kind.outbox.saved())
        kind._bring_back()


class OutboxBrokerTestMixin:
    """Gives every test of a TransactionTestCase an empty real broker as `self.outbox`.

    The `databases` of the test must contain the broker's alias.
    """

    outbox: BrokerOutbox

    def setUp(self) -> None:
        super().setUp()  # type: ignore[misc]
        self.outbox = self.enterContext(broker_outbox())  # type: ignore[attr-defined]
