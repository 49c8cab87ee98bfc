"""What an operator may do from the page. Each calls what the commands call."""
