"""The sources of received messages: queues of RabbitMQ, topics of Kafka. They need an extra each, but not Django."""
