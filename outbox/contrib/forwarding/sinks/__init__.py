"""The sinks for forwarded messages: webhooks, RabbitMQ, Redis, SQS, Kafka.

Each sink needs an extra of the package, but does not need Django.
"""
