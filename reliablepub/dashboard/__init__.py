"""The page for the person on call: the outbox in a browser, and what can be done about it.

Needs the extra ``dashboard``.
"""
