"""Offers to customers who have paid, by mail: consumer group offers."""
