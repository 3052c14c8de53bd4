"""The settings of the Django project that the tests run.

Its databases are in `SHOP_FOLDER`, or at the PostgreSQL server of `SHOP_SERVER`: host, port, user.
"""

import os
from pathlib import Path

FOLDER = Path(os.environ["SHOP_FOLDER"])
SERVER = os.environ.get("SHOP_SERVER", "").split()


def database(name: str) -> dict[str, object]:
    if SERVER:
        host, port, user = SERVER
        return {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": os.environ.get(f"SHOP_{name.upper()}", f"shop_{name}"),
            "HOST": host,
            "PORT": port,
            "USER": user,
            "OPTIONS": {"server_side_binding": name == "archive", "sslmode": "disable"},
            "ATOMIC_REQUESTS": True,
        }
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get(f"SHOP_{name.upper()}", FOLDER / f"{name}.db"),
        "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20},
        "ATOMIC_REQUESTS": True,
        "TEST": {"NAME": FOLDER / f"test-{name}.db"},
    }


SECRET_KEY = "of a test"
DATABASES = {
    "default": database("default"),
    "archive": database("archive"),
    "memory": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
}
RELIABLEPUB = {"DATABASES": ["default", "archive"]}
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "reliablepub.integrations.django",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
ROOT_URLCONF = "tests.integrations.django_urls"
STATIC_URL = "static/"
USE_TZ = True
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
