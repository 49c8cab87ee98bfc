"""The operator actions, each declared once. Commands, pages and the audit are made from the declarations."""
