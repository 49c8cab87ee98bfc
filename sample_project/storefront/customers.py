"""Who is visiting: a name drawn on the first purchase and kept in a signed cookie."""

from __future__ import annotations

import secrets
from typing import Final

from django.http import HttpRequest

_SESSION_KEY: Final = "customer"
_TEMPERS: Final = ("brisk", "calm", "candid", "gentle", "merry", "patient", "quiet", "steady")
_BIRDS: Final = ("curlew", "egret", "finch", "heron", "lapwing", "plover", "swift", "wren")


def known(request: HttpRequest) -> str:
    """The visitor's name, empty for somebody who has not put anything into a cart yet."""
    return str(request.session.get(_SESSION_KEY, ""))


def identify(request: HttpRequest) -> str:
    """The visitor's name, drawn now if need be."""
    if not known(request):
        name = f"{secrets.choice(_TEMPERS)}-{secrets.choice(_BIRDS)}-{secrets.token_hex(4)}"
        request.session[_SESSION_KEY] = name
    return known(request)
