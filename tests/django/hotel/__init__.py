"""The example of docs/saga.md: rooms that are reserved, paid within half an hour, or given back."""
