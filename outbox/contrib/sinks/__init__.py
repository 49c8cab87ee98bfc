"""The sinks for forwarded messages: webhooks, RabbitMQ, Redis, SQS, Kafka. Without Django; one extra for each."""
