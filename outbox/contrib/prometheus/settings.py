"""The environment variable that this part reads."""

from __future__ import annotations

from typing import Final

from outbox.contrib.django.settings.conf import Variable

ENVIRONMENT: Final = (
    Variable("PROMETHEUS_MULTIPROC_DIR", "you", "prometheus-client's folder, which several web processes share"),
)
