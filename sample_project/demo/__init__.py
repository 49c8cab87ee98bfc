"""`python -m sample_project.demo`: real orders, real crashes, and the figures that show what became of them."""
