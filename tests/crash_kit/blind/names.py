"""The names of the forty cases, the topics and groups of each, and the line that the report of a faulty one names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Case:
    """One case. `line`: what the report of the faulty handler names; '' if any line will do."""

    name: str
    is_faulty: bool
    line: str = ""
    groups: tuple[str, ...] = ()
    topic: str = ""
    topic_options: dict[str, Any] = field(default_factory=dict)
    kill_scenario: bool = False

    @property
    def id(self) -> str:
        return f"{'faulty' if self.is_faulty else 'correct'}.{self.name}"


# The name of a pair, and the line of the faulty handler.
_LINES = {
    "switch": "product.save()",
    "report": 'ReportLine.objects.using("reports").create(',
    "ship": 'Order.objects.filter(number=number).update(status="shipping")',
    "paid": "with transaction.atomic():",
    "points": "with transaction.atomic():",
    "charge": 'delivery.step("charge", ',
    "transfer": 'delivery.step("transfer", ',
    "coupon": "Coupon.objects.get(",
    "basket": "",
    "trip": "outside.refunds.call(",
    "label": "Label.objects.create(",
    "customers": "",
    "lines": "LineByReference.objects.bulk_create(",
    "locked": "Shipment.objects.create(",
    "document": "document.delete()",
    "parcels": 'delivery.step(f"ship {position}", ',
    "invoice": 'delivery.step("invoice", call)',
    "price": "",
    "tour": "bad_tour.proceed(",
    "text": "outside.texts.call(",
}
_GROUPS = {
    "trip": ("{kind}_trip.charge_trip", "{kind}_trip.print_ticket"),
    "tour": ("{kind}_tour.ask_for_money", "{kind}_tour.print_tour", "{kind}.money"),
}
_TOPICS = {"trip": "{kind}.trips", "tour": "{kind}.tours"}
_FIFO = {"types": ["FIFO", "TRANSACTION"]}


def _case(name: str, kind: str) -> Case:
    return Case(
        name=name,
        is_faulty=kind == "bad",
        line=_LINES[name] if kind == "bad" else "",
        groups=tuple(group.format(kind=kind) for group in _GROUPS.get(name, ("{kind}." + name,))),
        topic=_TOPICS.get(name, "{kind}." + name).format(kind=kind),
        topic_options=_FIFO if (kind, name) == ("good", "price") else {},
        # The function that pays is the one that is tested.
        kill_scenario=name == "paid",
    )


CASES = [_case(name, kind) for kind in ("bad", "good") for name in _LINES]
