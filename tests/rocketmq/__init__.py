"""The RocketMQ engine against a real server, which Maven brings (marker `rocketmq`)."""
