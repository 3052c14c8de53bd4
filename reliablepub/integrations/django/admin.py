"""The admin page of parked messages: why each was given up, and an action that retries.

Knows: Django's admin, and the outbox of each database. Must never know: the broker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from django.contrib import admin, messages
from django.db import DatabaseError, transaction
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect

from reliablepub import OutboxError
from reliablepub.integrations.django import DjangoOutbox, aliases
from reliablepub.integrations.django.models import ParkedMessage


class DatabaseFilter(admin.SimpleListFilter):
    """Selects one of several outboxes; by default the first of the setting ``DATABASES``."""

    title = "database"
    parameter_name = "database"

    def lookups(self, _request: HttpRequest, _model_admin: object) -> Iterable[tuple[str, str]]:
        """Return the other outboxes."""
        return [(alias, alias) for alias in aliases()[1:]]

    def queryset(self, _request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return the messages of the selected outbox."""
        chosen = self.value()
        return queryset.using(chosen) if chosen in aliases() else queryset


def _without_transactions(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """Exempt a view from ``ATOMIC_REQUESTS`` in each database that has an outbox."""
    for alias in aliases():
        view = transaction.non_atomic_requests(alias)(view)
    return view


@admin.register(ParkedMessage)
class ParkedMessageAdmin(admin.ModelAdmin):
    """Shows parked messages, and retries the selected ones."""

    actions = ("retry",)
    list_display = ("message_id", "exchange", "routing_key", "reason", "attempts", "parked_at")
    list_display_links = None
    list_filter = (DatabaseFilter, "state", "outcome", "exchange")
    search_fields = ("message_id", "routing_key", "reply_text")
    show_facets = admin.ShowFacets.NEVER

    @admin.display(description="reason")
    def reason(self, parked: ParkedMessage) -> str:
        """The outcome, with the text of the broker or of this library."""
        code = f"{parked.reply_code} " if parked.reply_code else ""
        return f"{parked.outcome}: {code}{parked.reply_text}"

    @admin.action(description="Retry the selected messages", permissions=["change"])
    def retry(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        """Put messages back: the relay sends them at once."""
        chosen = list(queryset.values_list("id", flat=True))
        count = DjangoOutbox(queryset.db).outbox.retry(chosen)
        self.message_user(request, f"{count} of {len(chosen)} will be sent again", messages.SUCCESS)

    @_without_transactions
    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the list, or retry messages.

        The outbox has a connection of its own, which would wait for the transaction of the request.
        """
        try:
            return super().changelist_view(request, extra_context)
        except (DatabaseError, OutboxError) as error:  # such as a user with fewer privileges
            self.message_user(request, f"the outbox cannot be shown: {error}", messages.ERROR)
            return redirect("admin:index")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the messages of the first outbox."""
        return super().get_queryset(request).using(aliases()[0])

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:  # noqa: ANN401
        """Return False for one message: it can be retried, and not edited."""
        return obj is None and bool(super().has_change_permission(request))

    def has_add_permission(self, _request: HttpRequest) -> bool:
        """Return False: the relay alone parks messages."""
        return False

    def has_delete_permission(self, _request: HttpRequest, _obj: object = None) -> bool:
        """Return False: ``reliablepub outbox discard`` deletes messages, and counts them."""
        return False
