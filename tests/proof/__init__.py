"""Models of the protocols, and their broken variants: `python -m tests.proof` (`make proof`)."""
