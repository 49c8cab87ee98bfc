"""The pages. This app reads every other app; no other app reads it."""
