"""The client of the payment provider."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from django.conf import settings

from outbox.errors import PermanentError, ServiceUnavailable

TIMEOUT_SECONDS: Final = 30.0


def charge(order_id: int, amount: str, idempotency_key: str) -> str:
    """Charge `amount` euro and return the provider's number of the charge.

    Two calls with the same key are one charge. Raises ServiceUnavailable if the provider does not answer: the
    subscription then pauses, and the message uses up no attempt. Raises PermanentError if the provider refuses the
    charge: the message becomes a dead letter at once.
    """
    request = Request(
        f"{settings.PAYMENT_PROVIDER}/charges",
        data=json.dumps({"order": order_id, "amount": amount}).encode(),
        headers={"Content-Type": "application/json", "Idempotency-Key": idempotency_key},
    )
    try:
        with urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            found: dict[str, Any] = json.load(answer)
    except HTTPError as error:
        if error.code != HTTPStatus.PAYMENT_REQUIRED:
            raise
        raise PermanentError(
            f"order {order_id} is not charged: the payment provider refuses {amount} euro ({error.reason}). "
            "Agree with the provider, then replay the dead letter."
        ) from error
    except (URLError, TimeoutError, ConnectionError) as error:
        raise ServiceUnavailable(
            f"the payment provider at {settings.PAYMENT_PROVIDER} does not answer: {error}"
        ) from error
    return str(found["number"])
