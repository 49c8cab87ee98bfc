"""The pages as a site for browsers."""

from __future__ import annotations

from dataclasses import dataclass

from django.conf import settings
from django.contrib.auth.models import User

from tests.django.operators import client_of
from tests.sample.browser import Browser


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
