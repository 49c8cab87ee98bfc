"""Sources: messages of other senders, from real servers."""
