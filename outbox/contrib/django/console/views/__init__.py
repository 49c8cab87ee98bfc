"""What the pages show, by subject."""
