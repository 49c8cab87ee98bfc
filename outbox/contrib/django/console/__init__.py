"""The operations page: shows the broker's state and runs operator actions."""
