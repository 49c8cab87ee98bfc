"""Ships what was paid: consumer group logistics, producer of shipment.created."""
