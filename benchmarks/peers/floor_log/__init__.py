"""The least work of a log: what docs/guarantees.md cannot do without, prepared and written flat, and nothing else.

A message is a row of the log and a row with its decision. A tick reads by snapshots what was decided since the last
one, numbers it without gaps, and records how far it read. Each message has a savepoint and an inbox row in its
handler's transaction; after it, the group's offset is stored. Nothing checks, locks keys, retries, limits, traces or
asks back, and retention comes later. `benchmarks/peers/floor` is the least work of any outbox: it removes its messages
and has no order.
"""
