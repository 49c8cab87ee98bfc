"""Tasks of the imaginary application."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import django

from tests.django.shop.models import Effect

if TYPE_CHECKING or django.VERSION >= (6, 0):
    from django.tasks import TaskContext, task
else:
    from django_tasks import TaskContext, task


@task
def note(number: str) -> str:
    """One effect, and a value."""
    Effect.objects.create(number=number)
    return f"noted {number}"


@task
def nap(number: str) -> None:
    """One effect, after a while in which other handlers run."""
    time.sleep(0.2)
    Effect.objects.create(number=number)


@task
async def note_async(number: str) -> list[Any]:
    """The same from a coroutine."""
    await Effect.objects.acreate(number=number)
    return [number, {"async": True}]


@task
def fail(number: str) -> None:
    """An effect that must not stay."""
    Effect.objects.create(number=number)
    raise LookupError(f"{number} cannot be found")


@task(takes_context=True)
def fail_first(context: TaskContext[Any, Any], number: str) -> int:
    """Succeeds at the second attempt."""
    Effect.objects.create(number=number)
    if context.attempt == 1:
        raise LookupError("the first attempt fails")
    return context.attempt


@task
def leave(number: str) -> None:
    """Ends the process, it thinks."""
    Effect.objects.create(number=number)
    raise SystemExit(3)


@task
def strange(number: str) -> object:
    """Returns what JSON cannot hold."""
    Effect.objects.create(number=number)
    return object()


@task(queue_name="mail")
def mail(number: str) -> None:
    """For a queue of its own."""
    Effect.objects.create(number=number)


@task
def pause(seconds: float) -> None:
    """Leaves its transaction idle for a while, like a task that calls another service."""
    Effect.objects.create(number="before")
    time.sleep(seconds)
    Effect.objects.create(number="after")
