"""Celery tasks that are stored with the calling transaction, and Celery tasks that messages call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any, Final, TypeVar
from uuid import uuid5

from outbox.broker.celery.tasks import RecordedTask, hand_over, record
from outbox.contrib.django.publishing.publish import (
    connection_to_join,
    errors_roll_back_the_block,
    publish,
)
from outbox.contrib.django.settings.conf import get_settings, imported, tasks_topic
from outbox.contrib.django.subscribers.registry import Subscriber, register, subscriber
from outbox.errors import ConfigurationError, InvalidName, InvalidSubscription, TransactionUsageError
from outbox.message import Delivery
from outbox.names import check_tag
from outbox.retry import RetryPolicy
from outbox.subscription import Subscription

AnyTask = TypeVar("AnyTask", bound=Callable[..., Any])

# There is no limit of attempts, because Celery's broker may be down for a long time.
_UNTIL_IT_IS_THERE: Final = RetryPolicy(delays_seconds=[1, 5, 10, 30, 60], max_attempts=None)


class TransactionalTask(RecordedTask):
    """A Celery task whose calls inside `atomic()` are stored with the transaction.

    A consumer process sends the call to Celery's broker after the transaction has committed. If the transaction rolls
    back, the call is not sent. docs/celery.md lists the forms of a call. A call outside of `atomic()` is an ordinary
    Celery call. `self.retry()` and `self.replace()` are sent at once. Use the class as
    `@shared_task(base=TransactionalTask)`, or for all tasks: `Celery("shop", task_cls=TransactionalTask)`. `using`
    names the database alias if transactions are open on several aliases. The task needs OUTBOX['CELERY_APP'] and a
    consumer process.
    """

    abstract = True
    using: str | None = None

    def delay_on_commit(self, *args: Any, **kwargs: Any) -> None:
        """Call the task after the commit, as in Celery's own task class for Django.

        With this class, a crash after the commit cannot lose the call.
        """
        self.apply_async(args, kwargs)

    def apply_async_on_commit(self, *args: Any, **kwargs: Any) -> None:
        """Do the same as `delay_on_commit`, with the arguments of `apply_async`."""
        self.apply_async(*args, **kwargs)

    def _record_now(self, name: str) -> bool:
        try:
            return connection_to_join(self.using) is not None
        except TransactionUsageError as error:
            raise TransactionUsageError(
                f"the call of the task {name} is stored with the open transaction, but its alias is not clear. Name "
                f"the alias in the declaration of the task, for example @shared_task(using='default'). {error}"
            ) from error

    def _recording(self) -> AbstractContextManager[None]:
        return errors_roll_back_the_block(self.using)

    def _store(self, name: str, recorded: Mapping[str, Any]) -> None:
        settings = get_settings()
        if settings.celery_app is None:
            raise ConfigurationError(
                f"the task {name} is called in a transaction, but OUTBOX['CELERY_APP'] is not set, so no process "
                "would send the call to Celery. Set OUTBOX['CELERY_APP'] to the dotted path of the app, for example "
                "'shop.celery.app', and run `manage.py migrate`, which creates the topic of the calls."
            )
        # Celery takes any text as the name of a task. The tag only serves those who look at the messages.
        tag = ""
        with suppress(InvalidName):
            tag = check_tag(name)
        publish(
            tasks_topic(settings), recorded, tag=tag, headers={"task_id": recorded["headers"]["id"]}, using=self.using
        )


def register_hand_over() -> None:
    """Register the subscriber that sends stored task calls to the service's own Celery app (OUTBOX['CELERY_APP'])."""
    topic = tasks_topic(get_settings())
    register(
        Subscriber(
            subscription=Subscription(group=topic, topic=topic, retry=_UNTIL_IT_IS_THERE),
            handler=_hand_over,
            name=f"{__name__}:hand_over",
        )
    )


def _hand_over(delivery: Delivery) -> None:
    hand_over(imported("OUTBOX['CELERY_APP']", str(get_settings().celery_app)), delivery.body)


def subscriber_task(topic: str, *, group: str, **options: Any) -> Callable[[AnyTask], AnyTask]:
    """Let a Celery task handle the messages of a topic. Celery's pool calls the task with the decoded body.

        @subscriber_task("order.paid", group="mail")
        @shared_task
        def send_receipt(order): ...

    The consumer process sends the call to Celery's broker. When Celery's broker has accepted the call, the message
    counts as handled. From then on, Celery's rules apply to the call (acks_late, retries). If the call is sent twice,
    both calls have the same task id. The function takes the same `options` as `subscriber`, except `batch`.
    """
    if options.get("batch", 1) != 1:
        raise InvalidSubscription(
            f"@subscriber_task({topic!r}, group={group!r}): each message is a call of the task, so batch is not "
            "possible: remove batch."
        )
    options.setdefault("retry", _UNTIL_IT_IS_THERE)

    def decorate(task: AnyTask) -> AnyTask:
        def call(delivery: Delivery) -> None:
            task_id = str(uuid5(delivery.message_id, delivery.group))
            if task.app.conf.task_always_eager:  # type: ignore[attr-defined]
                # An eager call never reaches a broker: Celery runs it in this thread.
                task.apply((delivery.body,), task_id=task_id, throw=True)  # type: ignore[attr-defined]
                return
            hand_over(task.app, record(task, (delivery.body,), task_id=task_id))  # type: ignore[attr-defined]

        call.__module__, call.__qualname__ = task.__module__, f"{task.__name__} as a task"
        subscriber(topic, group=group, **options)(call)
        return task

    return decorate
