"""The pages. It reads every app and is read by none."""
