"""The picture of `make bench-quick`."""

from __future__ import annotations

from xml.etree import ElementTree

from benchmarks.quick import Bar, Chart, svg

SVG = "{http://www.w3.org/2000/svg}"


def test_the_picture_has_a_bar_for_each_way_in_proportion() -> None:
    rates = Chart("messages/s", [Bar("this project, atomic", 1500, 1400, 2000), Bar("a < b", 500, 400, 600)])
    waits = Chart("milliseconds", [Bar("this project, atomic", 0.5, 0.4, 0.9)])
    root = ElementTree.fromstring(svg([rates, waits], "2 cores"))
    texts = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    for shown in ("messages/s", "this project, atomic", "a < b", "1,500", "500", "0.5", "2 cores"):
        assert shown in texts
    _, first, second, _ = root.iter(f"{SVG}rect")
    assert float(first.attrib["width"]) == 3 * float(second.attrib["width"])
    assert first.attrib["fill"] != second.attrib["fill"]
