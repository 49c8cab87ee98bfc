"""Sources: what others have sent, from real servers."""
