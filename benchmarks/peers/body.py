"""The body of each message besides its number: some 280 bytes of JSON."""

from __future__ import annotations

BODY = {
    "customer": "customer-0001234",
    "total": "129.90",
    "currency": "EUR",
    "lines": [{"sku": f"sku-{n:04d}", "n": 1} for n in range(5)],
    "paid_at": "2026-01-01T00:00:00+00:00",
}
