"""Transactional messages for web applications. A business write and its messages happen together, or not at all."""

from outbox.checkback import CheckBack
from outbox.codec import BytesCodec, Codec, Codecs, JsonCodec
from outbox.message import Delivery, Message, SendReceipt
from outbox.recall import Recall, RecallStatus
from outbox.retry import RetryPolicy
from outbox.subscription import Effects, Mode, OnError, Start, Subscription
from outbox.topic import MessageType, Topic
from outbox.transaction import Answer, Check, Decision, EndStatus, EndTransaction, HalfTransaction

__all__ = [
    "Answer",
    "BytesCodec",
    "Check",
    "CheckBack",
    "Codec",
    "Codecs",
    "Decision",
    "Delivery",
    "Effects",
    "EndStatus",
    "EndTransaction",
    "HalfTransaction",
    "JsonCodec",
    "Message",
    "MessageType",
    "Mode",
    "OnError",
    "Recall",
    "RecallStatus",
    "RetryPolicy",
    "SendReceipt",
    "Start",
    "Subscription",
    "Topic",
]
