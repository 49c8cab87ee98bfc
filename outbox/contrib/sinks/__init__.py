"""The sinks that messages are forwarded to:

webhooks, RabbitMQ, Redis, SQS, Kafka. Without Django; one extra for each.
"""
