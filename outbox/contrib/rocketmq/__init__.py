"""Apache RocketMQ as the broker: the engine for OUTBOX['BROKER'] = 'rocketmq://PROXY:8081?brokers=BROKER:10911'.

    INSTALLED_APPS = [..., "outbox.contrib.django", "outbox.contrib.rocketmq"]

The client, which needs no Django, is the package `outbox.rocketmq`. It belongs to this part, and nothing else imports
it. docs/engines.md is the page of the part.
"""
