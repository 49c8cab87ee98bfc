"""The views of the page, by subject."""
