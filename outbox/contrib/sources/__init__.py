"""The sources that messages are received from:

queues of RabbitMQ, topics of Kafka. Without Django; one extra for each.
"""
