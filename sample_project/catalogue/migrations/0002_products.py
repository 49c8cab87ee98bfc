"""The articles of the shop."""

from decimal import Decimal
from typing import Any

from django.db import migrations

PRODUCTS = [
    ("writing-paper", "Laid writing paper", "Fifty sheets, 120 g, made for ink that takes its time.", "14.50"),
    ("envelopes", "Lined envelopes", "Twenty-five, with tissue lining and a proper flap.", "11.00"),
    ("fountain-pen", "Fountain pen", "Brass barrel, broad nib, refills from the bottle.", "48.00"),
    ("ink", "Iron gall ink", "Thirty millilitres of blue that dries to black.", "16.80"),
    ("sealing-wax", "Sealing wax", "Three sticks in vermilion, for letters that matter.", "9.20"),
    ("letter-opener", "Letter opener", "Solid brass, balanced, sharp enough for good news.", "24.00"),
    ("notebook", "Cloth notebook", "Sewn binding, dotted pages, lies flat from page one.", "19.90"),
    ("parcel-string", "Parcel string", "Sixty metres of cotton twine, red and white.", "6.40"),
]


def add(apps: Any, schema_editor: Any) -> None:
    product = apps.get_model("catalogue", "Product")
    product.objects.using(schema_editor.connection.alias).bulk_create(
        product(slug=slug, name=name, description=description, price=Decimal(price))
        for slug, name, description, price in PRODUCTS
    )


def remove(apps: Any, schema_editor: Any) -> None:
    product = apps.get_model("catalogue", "Product")
    product.objects.using(schema_editor.connection.alias).filter(slug__in=[row[0] for row in PRODUCTS]).delete()


class Migration(migrations.Migration):
    dependencies = [("catalogue", "0001_initial")]
    operations = [migrations.RunPython(add, remove)]
