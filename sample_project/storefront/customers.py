"""The visitor: a name chosen at the first purchase and kept in a signed cookie."""

from __future__ import annotations

import secrets
from typing import Final

from django.http import HttpRequest

_SESSION_KEY: Final = "customer"
_TEMPERS: Final = ("brisk", "calm", "candid", "gentle", "merry", "patient", "quiet", "steady")
_BIRDS: Final = ("curlew", "egret", "finch", "heron", "lapwing", "plover", "swift", "wren")


def known(request: HttpRequest) -> str:
    """The visitor's name, empty before the first item in the cart."""
    return str(request.session.get(_SESSION_KEY, ""))


def identify(request: HttpRequest) -> str:
    """The visitor's name, chosen now if necessary."""
    if not known(request):
        name = f"{secrets.choice(_TEMPERS)}-{secrets.choice(_BIRDS)}-{secrets.token_hex(4)}"
        request.session[_SESSION_KEY] = name
    return known(request)
