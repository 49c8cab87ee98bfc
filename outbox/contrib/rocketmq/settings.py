"""The environment variables that this part reads. Its settings are all in the address (docs/engines.md)."""

from __future__ import annotations

from typing import Final

from outbox.contrib.django.settings.conf import Variable

ENVIRONMENT: Final = (
    Variable(
        "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
        "you",
        "RocketMQ with `tls=`: the file with the certificates of your own authority; by default those of the system",
    ),
    Variable(
        "GRPC_ENABLE_FORK_SUPPORT",
        "you",
        "RocketMQ: without it, outbox sets `0`, because gRPC's handlers of `fork` can end a forked child",
    ),
)
