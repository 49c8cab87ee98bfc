"""Settings of the blind trial: the sample's, with an endpoint, and with short times until a condition holds."""

from __future__ import annotations

import os

from sample_project.settings import *  # noqa: F403
from sample_project.settings import INSTALLED_APPS as SAMPLE_APPS
from sample_project.settings import OUTBOX as SAMPLE

INSTALLED_APPS = [*SAMPLE_APPS, "outbox.contrib.forwarding"]
OUTBOX = SAMPLE | {
    "FORWARD": {
        "partner": {
            "topics": ["order.paid"],
            "sink": "webhook",
            "options": {
                "url": os.environ["TRIAL_ENDPOINT"],
                "secrets": ["whsec_" + "QUFB" * 11],
                "allow_private": True,
                "allow_http": True,
            },
        }
    },
    "THRESHOLDS": {
        "LAG_SECONDS": (5, 600),
        "LIMIT_SECONDS": (10, None),
        "UNANSWERED_SECONDS": (5, 600),
        "NO_SEQUENCER_SECONDS": (0, 5),
    },
}
