"""A separate app that lets each message name the message whose handler published it.

    INSTALLED_APPS = [..., "outbox.contrib.console", "outbox.contrib.console.followers"]

Workers with this app write the header `outbox-cause` into what their handlers publish. From it, the page of a message
shows the followers of its transaction. Without the app, nothing in a message names its cause.
"""
