"""Where messages of others come from: queues of RabbitMQ, topics of Kafka. Without Django; an extra for each."""
