"""The least work of an outbox in Django: each statement that a path cannot do without, prepared, and nothing else.

A message is not checked, ordered, retried, kept, traced or shown to an operator. If the broker has a database of its
own, nothing asks back about a half message. So no outbox with the same promise about a crash of a process can do less
in the request, and no handler can start after fewer commits.
"""
