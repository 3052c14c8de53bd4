"""The configuration of the application. Must never know: messages."""

from django.apps import AppConfig
from django.core import checks
from django.db.models.signals import post_migrate

from reliablepub.integrations.django.checks import check_broker, check_databases
from reliablepub.integrations.django.creation import complete


class ReliablePubConfig(AppConfig):
    """The application that ``INSTALLED_APPS`` names."""

    name = "reliablepub.integrations.django"
    label = "reliablepub"
    verbose_name = "RabbitMQ outbox"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Have each ``migrate`` add or upgrade the outbox; register the checks."""
        post_migrate.connect(complete, sender=self)
        checks.register(check_databases)
        checks.register(check_broker, deploy=True)
