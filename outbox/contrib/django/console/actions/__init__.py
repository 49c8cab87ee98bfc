"""The operator actions of the page. Each calls the same functions as the commands."""
