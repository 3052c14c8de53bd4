"""Parked messages as a model: a view of the outbox, which Django neither creates nor changes.

Knows: the columns of the view. Must never know: bodies and headers, which it does not have.
"""

from __future__ import annotations

from django.db import models


class ParkedMessage(models.Model):
    """A message that was given up, with the broker's reason. An operator can retry it."""

    message_id = models.CharField(max_length=255)
    exchange = models.CharField(max_length=255)
    routing_key = models.CharField(max_length=255)
    ordering_key = models.CharField(max_length=255, null=True)  # noqa: DJ001 - NULL in the view
    state = models.CharField(max_length=10)
    outcome = models.CharField(max_length=20)
    reply_code = models.IntegerField()
    reply_text = models.TextField()
    attempts = models.IntegerField()
    stored_at = models.DateTimeField()
    parked_at = models.DateTimeField()
    size = models.IntegerField(help_text="bytes")

    class Meta:
        """A view of the outbox."""

        managed = False
        db_table = "reliablepub_parked_messages"
        verbose_name = "parked message"
        ordering = ("id",)

    def __str__(self) -> str:
        """Name the message and where it was to go."""
        return f"{self.message_id} to {self.exchange!r} {self.routing_key!r}"
