"""django-reliable-outbox: `publish` writes a row, `manage.py outbox_worker` claims rows in tens and marks each."""
