"""`python -m sample_project.demo`: real orders, real crashes, and the figures of their outcome."""
