"""Options: what is accepted, what is refused, and in which words."""

import pickle
import re
from pathlib import Path

import pytest

from reliablepub import ConfigurationError
from spark_sink.options import as_markdown, parse
from spark_sink.settings import TABLE, Settings

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "spark.md"


def test_without_options_there_are_defaults() -> None:
    assert parse({}) == Settings()


@pytest.mark.parametrize("name", ["routing_key", "ROUTING_KEY", "routingKey", "routingkey"])
def test_case_and_underscores_make_no_difference(name: str) -> None:
    assert parse({name: "orders"}).routing_key == "orders"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rootingkey": "x"}, "there is no option 'rootingkey' (did you mean 'routing_key'?)"),
        ({"zzz": "x"}, "there is no option 'zzz'; there are app_id, caFile"),
        ({"window": "0"}, "option 'window' must be a whole number from 1 to 2147483647"),
        ({"window": "many"}, "option 'window' must be a whole number"),
        ({"window": str(2**31)}, "option 'window' must be a whole number from 1 to 2147483647"),
        ({"window": "9" * 5_000}, "option 'window' must be a whole number from 1 to 2147483647"),
        ({"priority": "256"}, "from 0 to 255"),
        ({"expiration": "315360000001"}, "from 0 to 315360000000"),
        ({"confirmtimeout": "-1"}, "option 'confirmTimeout' must be a number of seconds above 0"),
        ({"confirmtimeout": "nan"}, "option 'confirmTimeout' must be a number of seconds above 0"),
        ({"idletimeout": "1e300"}, "must be a number of seconds above 0 and at most 1000000"),
        ({"persistent": "yes"}, "option 'persistent' must be true or false"),
        ({"unroutable": "skip"}, "option 'unroutable' must be fail or collect"),
        ({"url": "http://host/"}, "option 'url' must be amqp://"),
        ({"url": "amqp://a/", "urlfile": "b"}, "'url' or 'urlFile', not both"),
        ({"passwordenv": "A", "passwordfile": "b"}, "'passwordEnv' or 'passwordFile', not both"),
        ({"url": "amqp://u:canary@a/", "passwordfile": "b"}, "'url': a separate password needs"),
        ({"url": "amqp://u@a/,amqp://b/", "passwordenv": "B"}, "'url': a separate password needs"),
        ({"url": "amqp://u@[canary/", "passwordenv": "B"}, "'url': a separate password needs"),
        ({"keyfile": "a.pem"}, "'keyFile' needs 'certFile'"),
        ({"refused": "collect"}, "'collect' needs the option 'report'"),
        ({"report": "here"}, "'report' must be an absolute path or a URI"),
        ({"report": "s3://KEY:canary@bucket/r"}, "option 'report' has a password in its URI"),
        ({"report": "abfs://c@a/r?client_secret=canary"}, "option 'report' has a password"),
        ({"report": "s3://[bad/x", "url": "http://h/"}, "option 'url' must be amqp://"),
        ({"report": "abfs://c@a/r?sv=1&sig=canary"}, "option 'report' has a password in its URI"),
        ({"routing_key": "k" * 256}, "option 'routing_key' has 256 bytes"),
        ({"exchange": "x" * 256, "contenttype": "c" * 256}, "option 'content_type' has 256 bytes"),
        ({"replyto": "amq.rabbitmq.reply-to"}, "option 'reply_to'"),
        ({"path": "q1"}, "save() takes no path here: for a queue write .option('routing_key'"),
        ({"report": "/r", "writeid": "a/b"}, "option 'writeId' names files of 'report'"),
        ({"report": "/r", "writeid": "a:b"}, "option 'writeId' names files of 'report'"),
        ({"report": "/r", "writeid": "_a"}, "option 'writeId' names files of 'report'"),
        ({"heartbeat": "70000"}, "option 'heartbeat' must be a whole number from 1 to 65535"),
        ({"idcolumns": "a,,b"}, "option 'idColumns' must be names of columns"),
        ({"idcolumns": "a,A"}, "option 'idColumns' must be names of columns"),
        ({"routingkey": "a", "routing_key": "b"}, "option 'routing_key' is given twice"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(options)
    assert words in str(caught.value)
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize("report", ["/a:b@c/r", "hdfs://user@host:8020/r", "s3://bucket/r"])
def test_a_report_may_be_a_path_or_a_uri_with_a_user(report: str) -> None:
    assert parse({"report": report}).report == report


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse({"window": "0", "persistent": "maybe", "foo": "bar"})
    assert all(name in str(caught.value) for name in ("'window'", "'persistent'", "'foo'"))
    with pytest.raises(ConfigurationError) as caught:
        parse({"exchange": "x" * 256, "app_id": "a" * 256, "refused": "collect"})
    assert all(name in str(caught.value) for name in ("'exchange'", "'app_id'", "'report'"))


def test_what_spark_adds_to_a_stream_is_no_mistake() -> None:
    assert parse({"checkpointlocation": "/tmp/c", "queryname": "q"}) == Settings()


def test_settings_travel_and_hide_the_url() -> None:
    settings = parse({"url": "amqp://user:canary@host/"})
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert "canary" not in repr(settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("urlEnv", "amqp://user:canary@host/"),
        ("urlFile", "amqp://user:canary@host/"),
        ("passwordEnv", "canary!"),
        ("passwordFile", "amqp://user:canary@host/"),
        ("passwordFile", "canary\n"),
        ("caFile", "amqps://user:canary@host/"),
        ("certFile", "-----BEGIN CERTIFICATE----- canary"),
        ("keyFile", "-----BEGIN PRIVATE KEY-----\ncanary\n-----END PRIVATE KEY-----\n"),
    ],
)
def test_a_secret_in_place_of_its_place_is_not_shown(name: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'{name}' must be") as caught:
        parse({name: value})
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize("name", ["url", "window", "report"])
def test_no_error_shows_a_value(name: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse({name: "canary", "other": "canary"})
    assert "canary" not in str(caught.value)


def test_writes_share_a_connection_unless_it_would_differ() -> None:
    one, other = parse({"exchange": "a", "writeid": "1"}), parse({"exchange": "b", "writeid": "2"})
    assert one.connection == other.connection
    assert one.connection != parse({"window": "7"}).connection


def test_the_page_has_a_place_for_the_table_and_names_only_options_of_it() -> None:
    page = DOCUMENT.read_text()
    assert "<!-- the site shows every option here -->" in page
    rows = re.findall(
        r"^\| .*", page.partition("## Options")[2].partition("\n## ")[0], re.MULTILINE
    )
    listed = set(re.findall(r"`(\w+)`", "".join(rows)))
    assert listed == {option.metadata["name"] for option in TABLE}
    assert as_markdown().count("\n") == len(TABLE) + 2


def test_every_option_says_what_it_means() -> None:
    assert all(option.metadata["meaning"] for option in TABLE)
