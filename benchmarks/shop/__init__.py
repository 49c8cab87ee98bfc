"""A Django application with one model, for the web benchmarks."""
