"""Where messages come from that others have sent: queues of RabbitMQ. Without Django; an extra for each."""
