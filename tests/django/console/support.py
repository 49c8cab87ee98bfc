"""Users of the page, the page as a site, and messages in the states that are looked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from uuid import uuid4

from django.conf import settings
from django.contrib.auth.models import Permission, User
from django.test import Client

from outbox.broker.database.executor import Executor
from outbox.broker.operations import dead_letters
from tests.django.broker_world import World
from tests.sample.browser import Browser

ALL: Final = ("view_operations", "act", "view_bodies")


def make_user(*permissions: str, staff: bool = True) -> User:
    """Staff with these permissions."""
    user = User.objects.create_user(f"user-{uuid4().hex[:8]}", is_staff=staff)
    found = Permission.objects.filter(content_type__app_label="outbox", codename__in=permissions)
    assert len(found) == len(permissions)
    user.user_permissions.set(found)
    return user


def client_of(user: User | None, *, csrf: bool = False) -> Client:
    """A client that is logged in; None: an anonymous one."""
    client = Client(enforce_csrf_checks=csrf)
    if user is not None:
        client.force_login(user)
    return client


@dataclass(frozen=True)
class Site:
    """The pages under an address, for one user."""

    url: str
    user: User

    def open(self, browser: Browser, path: str = "/outbox/") -> None:
        """Open a page as the user."""
        cookie = client_of(self.user).cookies[settings.SESSION_COOKIE_NAME].value
        # `document.cookie = …` may return before the browser sends the cookie.
        browser.command("Network.setCookie", name=settings.SESSION_COOKIE_NAME, value=cookie, url=self.url)
        browser.goto(f"{self.url}{path}")


def bury(world: World, group: str, key: str, error: str, topic: str = "orders") -> None:
    """Make a queued message a dead letter of a group, after two attempts."""
    [(group_id, log_id)] = world.sql(
        "SELECT group_id, log_id FROM outbox.consumer_group, outbox.commit_log"
        " WHERE consumer_group.name = %s AND key = %s ORDER BY log_id DESC LIMIT 1",
        group, key,
    )  # fmt: skip
    for attempt in (0, 1):
        world.sql(
            "INSERT INTO outbox.failure (group_id, log_id, attempt, error) VALUES (%s, %s, %s, %s)",
            group_id, log_id, attempt, error,
        )  # fmt: skip
    world.sql(
        "INSERT INTO outbox.dead_letter (group_id, log_id, attempts, error) VALUES (%s, %s, 2, %s)",
        group_id, log_id, error,
    )  # fmt: skip


def dead_keys(run: Executor, group: str) -> list[str]:
    """The keys of a group's open dead letters."""
    return sorted(letter.key for letter in dead_letters.list_dead_letters(run, group))
