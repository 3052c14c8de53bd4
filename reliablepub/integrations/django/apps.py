"""The configuration of the application. Must never know: messages."""

from django.apps import AppConfig


class ReliablePubConfig(AppConfig):
    """The application that ``INSTALLED_APPS`` names."""

    name = "reliablepub.integrations.django"
    label = "reliablepub"
    verbose_name = "RabbitMQ outbox"
    default_auto_field = "django.db.models.BigAutoField"
