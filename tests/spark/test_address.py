"""Where URLs and passwords come from; no error shows what they are."""

import ssl
import subprocess
from pathlib import Path

import pytest

from reliablepub import ConfigurationError, Credentials
from spark_sink.address import credentials, ssl_context, urls
from spark_sink.options import parse
from tests.certificates import signed


def test_a_list_of_urls() -> None:
    assert urls(parse({"url": "amqp://a/, amqps://b/"})) == ["amqp://a/", "amqps://b/"]


def test_the_url_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELIABLEPUB_URL", "amqp://a/")
    monkeypatch.setenv("OTHER", "amqp://b/")
    assert urls(parse({})) == ["amqp://a/"]
    assert urls(parse({"urlEnv": "OTHER"})) == ["amqp://b/"]


def test_no_url_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RELIABLEPUB_URL", raising=False)
    with pytest.raises(ConfigurationError, match="set RELIABLEPUB_URL in the env") as caught:
        urls(parse({}))
    assert "executorEnv" not in str(caught.value), "Spark would show the URL"


def test_the_url_comes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "url"
    path.write_text("amqp://user:secret@a/\n")
    assert urls(parse({"urlFile": str(path)})) == ["amqp://user:secret@a/"]


def test_the_password_comes_from_a_file_and_is_read_each_time(tmp_path: Path) -> None:
    path = tmp_path / "password"
    settings = parse({"url": "amqp://user@a:1/v,amqp://user@b/", "passwordFile": str(path)})
    path.write_text("p@ss/word\n")
    provider = credentials(settings)
    assert urls(settings) == ["amqp://user@a:1/v", "amqp://user@b/"]
    assert provider is not None
    assert provider() == Credentials("p@ss/word")
    path.write_text("changed")
    assert provider() == Credentials("changed")


def test_the_password_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMQP_PASSWORD", "secret")
    settings = parse({"url": "amqp://user@a/,amqp://user@b/", "passwordEnv": "AMQP_PASSWORD"})
    assert urls(settings) == ["amqp://user:secret@a/", "amqp://user:secret@b/"]
    monkeypatch.setenv("AMQP_PASSWORD", "p@ss/word")
    assert urls(settings)[1] == "amqp://user:p%40ss%2Fword@b/"
    monkeypatch.delenv("AMQP_PASSWORD")
    with pytest.raises(ConfigurationError, match="AMQP_PASSWORD is not set"):
        urls(settings)


@pytest.mark.parametrize("option", ["passwordEnv", "passwordFile"])
@pytest.mark.parametrize("url", ["amqp://a/", "amqp://user:other-canary@a/"])
def test_a_password_needs_one_user_and_is_not_shown(
    url: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told on the driver if the option gives the URL, and by each task otherwise."""
    monkeypatch.setenv("P", "canary")
    monkeypatch.setenv("RELIABLEPUB_URL", f"amqp://user@b/,{url}")
    with pytest.raises(ConfigurationError, match="amqp://user@host/") as caught:
        urls(parse({option: "P"}))
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize("option", ["urlFile", "passwordFile"])
def test_a_missing_file_is_named(option: str) -> None:
    given = {option: "absent"} | ({} if option == "urlFile" else {"url": "amqp://u@a/"})
    with pytest.raises(ConfigurationError, match=f"'{option}': there is no file absent"):
        (urls if option == "urlFile" else credentials)(parse(given))


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "url"
    path.write_bytes(b"amqp://user:canary\xff@host/")
    with pytest.raises(ConfigurationError, match=r"'urlFile': .*cannot be read as text") as caught:
        urls(parse({"urlFile": str(path)}))
    assert "canary" not in str(caught.value)


def test_a_url_that_is_none_takes_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("P", "canary")
    path = tmp_path / "url"
    path.write_text("amqp://user@[host/")
    with pytest.raises(ConfigurationError, match="amqp://user@host/"):
        urls(parse({"urlFile": str(path), "passwordEnv": "P"}))


def test_an_encrypted_key_asks_for_no_passphrase(tmp_path: Path) -> None:
    """OpenSSL asks on the terminal, where a driver would wait for ever."""
    both, key = signed(tmp_path, "DNS:localhost"), tmp_path / "encrypted.pem"
    command = ["openssl", "ec", "-in", str(both), "-out", str(key)]
    command += ["-aes256", "-passout", "pass:canary"]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(ConfigurationError, match="is encrypted; give an unencrypted key"):
        ssl_context(parse({"certFile": str(both), "keyFile": str(key)}))


def test_certificates(tmp_path: Path) -> None:
    assert ssl_context(parse({})) is None
    wrong = tmp_path / "ca.pem"
    wrong.write_text("no certificate")
    with pytest.raises(ConfigurationError, match=f"the authorities in {wrong} cannot be used"):
        ssl_context(parse({"caFile": str(wrong)}))
    system = ssl.get_default_verify_paths().cafile
    if system is not None:
        files = ssl_context(parse({"caFile": system}))
        assert files is not None
        assert files().check_hostname


def test_a_name_that_no_file_can_have_is_no_file() -> None:
    with pytest.raises(ConfigurationError, match="there is no file"):
        credentials(parse({"url": "amqp://user@a/", "passwordFile": f"/{'x' * 300}"}))
