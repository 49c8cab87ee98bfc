"""Faults of Django's tasks, made for real; each is named as its condition."""

from __future__ import annotations

from datetime import timedelta

from django.utils import timezone

from outbox.contrib.tasks.models import TaskEntry
from tests.django.broker_world import World, fault
from tests.django.shop import tasks


@fault("warning")
def task_stranded(world: World) -> None:
    """The broker has lost the message of a Django task."""
    entry = TaskEntry.objects.get(pk=tasks.note.enqueue("1").id)
    world.stack.callback(TaskEntry.objects.all().delete)
    world.sql("DELETE FROM outbox.commit_log")
    entry.announced_at = timezone.now() - timedelta(minutes=5)
    entry.save()
