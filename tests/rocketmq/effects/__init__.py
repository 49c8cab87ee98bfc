"""A Django app whose subscribers the workers of these tests discover."""
