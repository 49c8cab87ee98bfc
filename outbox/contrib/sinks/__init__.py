"""The sinks for forwarded messages: webhooks, RabbitMQ, Redis, SQS, Kafka. They need an extra each, but not Django."""
