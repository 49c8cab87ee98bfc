"""Where messages are forwarded to: webhooks, RabbitMQ, Redis, SQS, Kafka. Without Django; an extra for each."""
