"""The sources of received messages: queues of RabbitMQ, topics of Kafka.

Each source needs an extra of the package, but does not need Django.
"""
