"""What Django is told of the application. Must never know: messages."""

from django.apps import AppConfig


class ReliablePubConfig(AppConfig):
    """The application, as ``INSTALLED_APPS`` names it."""

    name = "reliablepub.integrations.django"
    label = "reliablepub"
    verbose_name = "RabbitMQ outbox"
    default_auto_field = "django.db.models.BigAutoField"
