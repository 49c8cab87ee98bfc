"""The limits of a subscription: how many handlers run at the same time, per key, and how many start per time.

The limits hold for all workers of the group together. See decision 209.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from outbox import names
from outbox.errors import ConfigurationError
from outbox.subscription import Mode, Subscription, SubscriptionOption

_RATE: Final = re.compile(r"(\d+(?:\.\d+)?)/(s|min|h|day)")
_SECONDS: Final = {"s": 1.0, "min": 60.0, "h": 3600.0, "day": 86400.0}
_MOST_PER_SECOND: Final = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits(SubscriptionOption):
    """The limits of a subscription, for all workers of the group together. None means that there is no such limit.

    `running`: at most this number of handler calls run at the same time. `per_key`: at most this number of handler
    calls with messages of one key run at the same time. `rate`: at most this number of messages start per time, such as
    "100/min"; the units are s, min, h and day. `burst`: after a time without messages, this number of messages may
    start at once, and further messages start at `rate`.
    """

    running: int | None = None
    per_key: int | None = None
    rate: str | None = None
    burst: int = 1

    def __post_init__(self) -> None:
        for name in ("running", "per_key", "burst"):
            value = getattr(self, name)
            if not (names.is_whole(value) or (value is None and name != "burst")):
                raise ConfigurationError(
                    f"Limits({name}={value!r}): give a whole number from 1 to {names.MAX_INTEGER:,}."
                )
        if self.rate is not None and _per_second(self.rate) is None:
            raise ConfigurationError(
                f"Limits(rate={self.rate!r}): give a number above 0 and a unit, such as '5/s', '100/min', '1000/h' or "
                f"'20000/day', and at most {_MOST_PER_SECOND:,.0f}/s."
            )
        if (per_second := self.per_second) is not None and self.burst > per_second * names.MAX_DELAY_SECONDS:
            raise ConfigurationError(
                f"Limits(rate={self.rate!r}, burst={self.burst!r}): at this rate, the burst takes longer than 366 "
                "days. Give a higher rate or a smaller burst."
            )
        if self.burst > 1 and self.rate is None:
            raise ConfigurationError(f"Limits(burst={self.burst!r}) needs a rate, such as rate='100/min'.")
        if self.running is None and self.per_key is None and self.rate is None:
            raise ConfigurationError("Limits() limits nothing: give running, per_key or rate.")

    def complaints(self, subscription: Subscription) -> Iterator[str]:
        """Yield why a subscription cannot have these limits."""
        if subscription.broadcast:
            yield "a broadcast group has no limits, because every process handles every message: remove Limits"
        elif self.per_key is not None and subscription.mode is not Mode.CONCURRENT:
            yield (
                f"per_key={self.per_key} needs mode='concurrent'; mode={subscription.mode.value!r} already handles one "
                "message of a key at a time"
            )
        elif self.per_key is not None and subscription.batch != 1:
            yield f"per_key={self.per_key} needs batch=1, because a batch has messages of several keys"

    @property
    def waits_for_key(self) -> bool:
        """Whether messages wait until calls of their key have ended."""
        return self.per_key is not None

    @property
    def has_lane(self) -> bool:
        """Whether the messages wait in the lane that serves each key within its slots."""
        return self.per_key is not None

    @property
    def per_second(self) -> float | None:
        """The rate in messages per second; None without a rate."""
        return None if self.rate is None else _per_second(self.rate)

    def stored(self) -> dict[str, Any]:
        """Return the limits as the broker stores them: only the fields that are not None."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def changed(self, override: Mapping[str, Any] | None) -> Self:
        """Return these limits with the fields of an operator's override, as the broker stores it.

        An override may be older than the code. So a field that no longer fits has no effect: `per_key` if these limits
        have none, and `burst` without a rate. A burst that is too large for the rate becomes the largest allowed one.
        """
        fields = {**self.stored(), **(override or {})}
        if self.per_key is None:
            fields.pop("per_key", None)
        if (per_second := _per_second(fields.get("rate"))) is None:
            fields.pop("burst", None)
        else:
            fields["burst"] = min(fields["burst"], int(per_second * names.MAX_DELAY_SECONDS))
        return type(self)(**fields)

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.stored().items())


def _per_second(rate: object) -> float | None:
    found = _RATE.fullmatch(rate) if isinstance(rate, str) else None
    number = float(found[1]) / _SECONDS[found[2]] if found is not None else 0.0
    return number if 0 < number <= _MOST_PER_SECOND else None
