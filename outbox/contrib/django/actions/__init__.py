"""The operator actions, each declared once. Commands, pages and the audit use the declarations."""
