"""The formats that receivers get: CloudEvents are read back with the library's own readers."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from cloudevents.core.bindings import http, kafka, rabbitmq
from cloudevents.core.formats.json import JSONFormat

from outbox.contrib.forwarding.sinks.formats import format_named
from outbox.contrib.forwarding.sinks.sink import Outgoing
from outbox.errors import ConfigurationError
from tests.sinks.support import delivery


def read_back(binding: str, message: Outgoing) -> Any:
    if binding == "http":
        headers = {**message.headers, "content-type": message.content_type}
        return http.from_http_event(http.HTTPMessage(headers, message.body))
    if binding == "amqp":
        return rabbitmq.from_rabbitmq_event(
            rabbitmq.RabbitMQMessage(dict(message.headers), message.content_type, message.body)
        )
    encoded = {**message.headers, "content-type": message.content_type}
    return kafka.from_kafka_event(
        kafka.KafkaMessage({name: value.encode() for name, value in encoded.items()}, message.key, message.body)
    )


@pytest.mark.parametrize("binding", ["http", "amqp", "kafka"])
@pytest.mark.parametrize("mode", ["cloudevents-structured", "cloudevents-binary"])
def test_a_cloud_event_has_every_field_of_the_message(mode: str, binding: str) -> None:
    given = delivery("k ü", body=b'{"n": 1, "who": "Zo\xc3\xab"}', tag="paid", headers={"Trace-Id": "t 1", "id": "no"})
    event = read_back(binding, format_named(mode, binding=binding, source="/shop")(given, "order.paid"))
    assert (event.get_id(), event.get_source(), event.get_type()) == (str(given.message_id), "/shop", "order.paid")
    assert (event.get_specversion(), event.get_datacontenttype()) == ("1.0", "application/json")
    assert (event.get_subject(), event.get_extension("partitionkey")) == ("k ü", "k ü")
    assert event.get_time() == datetime(2026, 1, 2, tzinfo=UTC)
    assert (event.get_extension("traceid"), event.get_extension("tag")) == ("t 1", "paid")
    assert event.get_data() == {"n": 1, "who": "Zoë"}


@pytest.mark.parametrize("mode", ["cloudevents-structured", "cloudevents-binary"])
def test_a_typed_event_names_its_schema(mode: str) -> None:
    given = delivery(headers={"outbox-event": "order.paid", "outbox-event-version": "2"})
    event = read_back("http", format_named(mode, binding="http", source="/shop")(given, "order.paid"))
    assert event.get_dataschema() == "urn:event:order.paid:2"


def test_bytes_travel_in_a_structured_event_too() -> None:
    given = delivery(body=b"\x00\xff", content_type="application/octet-stream")
    message = format_named("cloudevents-structured", binding="http", source="/shop")(given, "order.paid")
    assert json.loads(message.body)["data_base64"] == "AP8="
    assert message.content_type.startswith("application/cloudevents+json")


def test_a_binary_event_leaves_the_body_as_it_is() -> None:
    given = delivery(body=b'{"n":1.10}')
    assert format_named("cloudevents-binary", binding="kafka", source="/shop")(given, "t").body == b'{"n":1.10}'
    assert JSONFormat().get_content_type() == "application/cloudevents+json"


@pytest.mark.parametrize(
    ("name", "source", "says"), [("xml", "", "use one of plain"), ("cloudevents-binary", "", "source")]
)
def test_what_cannot_be_right(name: str, source: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        format_named(name, binding="http", source=source)
