"""The shop of the documents: the examples of docs/*.md import its models as `shop.models`."""
