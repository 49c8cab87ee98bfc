"""The sources of received messages: queues of RabbitMQ, topics of Kafka. Without Django; one extra for each."""
