"""What worker processes of the tests discover: a module of this folder, which a test may choose (`process`)."""

from __future__ import annotations

import os
from importlib import import_module

import_module(os.environ.get("TEST_SUBSCRIBERS", "tests.django.effects.usual"))
