"""Dead letters that operators edit, because a handler cannot handle their content.
docs/editing.md is its page.

    INSTALLED_APPS = [..., "outbox.contrib.django", "outbox.contrib.editing"]

    manage.py outbox_dead_letter edit billing --error-type KeyError --patch '{"currency": "EUR"}' --replay
"""
