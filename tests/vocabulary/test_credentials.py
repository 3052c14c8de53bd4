"""Credentials as data, and the file that they may be read from."""

import base64
import json
import pickle
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from reliablepub import ConfigurationError, Credentials, PasswordFile

SECRET = "s3cr3t"


def jwt(claims: object) -> str:
    """A token without a valid signature; only its expiry is read."""
    body = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
    return f"e30.{body}.c2lnbmVk"


def test_the_secret_is_in_no_text() -> None:
    credentials = Credentials(SECRET, "orders", 60)
    assert SECRET not in f"{credentials} {credentials!r}"
    assert pickle.loads(pickle.dumps(credentials)) == credentials


@pytest.mark.parametrize(
    "wrong",
    [
        {"secret": ""},
        {"secret": f"{SECRET}\0"},
        {"secret": SECRET.encode()},
        {"secret": f"{SECRET}\udce4"},
        {"secret": SECRET, "user": "a\udce4"},
        {"secret": SECRET, "user": "a\0b"},
        {"secret": SECRET, "user": 7},
        {"secret": SECRET, "lifetime_s": 0},
        {"secret": SECRET, "lifetime_s": -3.5},
        {"secret": SECRET, "lifetime_s": float("inf")},
        {"secret": SECRET, "lifetime_s": float("nan")},
        {"secret": SECRET, "lifetime_s": "300"},
        {"secret": SECRET, "lifetime_s": timedelta(minutes=5)},
        {"secret": SECRET, "lifetime_s": True},
    ],
)
def test_what_no_broker_could_be_shown_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as raised:
        Credentials(**wrong)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_file_is_read_at_each_call(tmp_path: Path, end: str) -> None:
    file = PasswordFile(tmp_path / "password", "orders")
    for secret in ("first", "second é"):
        Path(file.path).write_text(secret + end, encoding="utf-8")
        assert file() == Credentials(secret, "orders")


def test_a_path_may_be_a_text(tmp_path: Path) -> None:
    (tmp_path / "password").write_text(SECRET)
    assert PasswordFile(str(tmp_path / "password"))() == Credentials(SECRET)


def test_a_file_that_cannot_be_used_says_so_without_its_content(tmp_path: Path) -> None:
    path = tmp_path / "password"
    with pytest.raises(ConfigurationError, match="No such file"):
        PasswordFile(path)()
    path.write_bytes(b"\xff" + SECRET.encode())
    with pytest.raises(ConfigurationError, match="not UTF-8") as raised:
        PasswordFile(path)()
    assert SECRET not in repr(raised.value)
    path.write_text("\n")
    with pytest.raises(ConfigurationError, match="is empty"):
        PasswordFile(path)()


def test_a_token_says_how_long_it_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(jwt({"exp": time.time() + 3_600}))
    lifetime_s = PasswordFile(path)().lifetime_s
    assert lifetime_s is not None
    assert 3_000 < lifetime_s <= 3_600


def test_an_expired_token_is_no_password(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(jwt({"exp": time.time() - 3_600}))
    with pytest.raises(ConfigurationError, match=r"the token in .*token expired 36\d\d s ago"):
        PasswordFile(path)()


@pytest.mark.parametrize(
    "text",
    [
        "a.b.c",
        "..",
        "a.é.c",
        "e30.bm8.x",
        jwt([]),
        jwt({}),
        jwt({"exp": None}),
        jwt({"exp": "soon"}),
        jwt({"exp": True}),
        jwt({"exp": float("inf")}),
        jwt({"exp": 10**400}),
    ],
)
def test_what_has_no_expiry_is_a_password_like_any_other(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_text(text, encoding="utf-8")
    assert PasswordFile(path)() == Credentials(text)
