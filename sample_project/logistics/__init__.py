"""Ships paid orders: consumer group logistics, producer of shipment.created."""
