"""The products of the shop."""

from __future__ import annotations

from django.db import models


class Product(models.Model):
    """One article. Prices are in euro."""

    slug = models.SlugField(unique=True)
    name = models.TextField()
    description = models.TextField()
    price = models.DecimalField(max_digits=8, decimal_places=2)

    class Meta:
        ordering = ("id",)
        constraints = (models.CheckConstraint(condition=models.Q(price__gt=0), name="product_price_positive"),)

    def __str__(self) -> str:
        return self.name
