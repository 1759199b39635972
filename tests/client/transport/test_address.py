"""What shows a caller to the broker: where it comes from, and that it is never shown."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from qmq_client import BrokerAccessError, BrokerAddress
from qmq_client.commands.root import root
from qmq_client.errors import ConfigurationError
from qmq_client.settings.config import load_config
from qmq_client.settings.sections import BrokerSection
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.requests import PullRequest
from tests.broker.face.guard import add_token, run_token
from tests.client.transport.hostile_server import hostile_server, raw
from tests.kit.broker_process import BrokerProcess

SECRET = "qmq_0123456789abcdef_" + "5" * 64
PULL = PullRequest(subject="orders", group="g", consumer="c")


def pull(address: str | BrokerAddress) -> int:
    with closing(HttpTransport(address, answer_timeout_s=60.0)) as transport:
        return len(transport.pull(PULL).messages)


def test_a_url_alone_takes_the_rest_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QMQ_BROKER_TOKEN", SECRET)
    monkeypatch.setenv("QMQ_BROKER_CA_FILE", "ca.pem")
    known = BrokerAddress.of("https://broker")
    assert (known.token, known.ca_file, known.cert_file) == (SECRET, "ca.pem", "")
    given = BrokerAddress(url="https://broker")
    assert BrokerAddress.of(given) is given


def test_the_configuration_names_the_same_things() -> None:
    section = BrokerSection(
        url="https://b", token_file="t", ca_file="a", cert_file="c", key_file="k"
    )
    assert BrokerAddress.of_section(section) == BrokerAddress(
        url="https://b", token_file="t", ca_file="a", cert_file="c", key_file="k"
    )


@pytest.mark.parametrize(
    "given",
    [
        {"token": "short"},
        {"token": SECRET + "\r\nx: y"},
        {"token": "é" * 80},
        {"token": SECRET * 3},
        {"token": SECRET, "token_file": "t"},
        {"key_file": "k"},
    ],
)
def test_what_cannot_be_shown_to_a_broker_is_refused_without_being_shown(
    given: dict[str, str],
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        BrokerAddress(url="https://b", **given)
    assert given.get("token", "-" * 99) not in str(caught.value)


@pytest.mark.parametrize("content", [None, b"", b"\xff" * 80, b"two words " * 9, b"x" * 5_000])
def test_a_file_without_a_token_is_refused_when_it_is_needed(
    tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigurationError, match="token"):
        HttpTransport(BrokerAddress(url="http://127.0.0.1:1", token_file=str(file)))


def test_a_path_that_is_none_is_no_file_with_a_token() -> None:
    with pytest.raises(ConfigurationError, match="token"):
        HttpTransport(BrokerAddress(url="http://127.0.0.1:1", token_file="/run/\0"))


def test_the_token_is_not_in_what_people_see_of_an_address_or_a_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("qmq.toml").write_text(f'[broker]\ntoken = "{SECRET}"\n')
    loaded = load_config(environment={})
    assert loaded.config.broker.token == SECRET
    shown = repr(loaded) + repr(BrokerAddress.of_section(loaded.config.broker))
    shown += CliRunner().invoke(root, ["config", "show"]).output
    shown += CliRunner().invoke(root, ["config", "show", "--json"]).output
    assert SECRET[-64:] not in shown
    assert "***" in shown
    Path("qmq.toml").write_text(f'[broker]\ntoken = ["{SECRET}"]\n')
    with pytest.raises(ConfigurationError) as caught:
        load_config(environment={})
    assert SECRET[-64:] not in str(caught.value)


def test_every_request_shows_the_token_and_no_other_place_has_it() -> None:
    with hostile_server(raw(b"")) as server:
        for given in (BrokerAddress(url=server.url, token=SECRET), server.url):
            with closing(HttpTransport(given)) as transport, pytest.raises(Exception, match="http"):
                transport.pull(PULL)
        with_token, without = server.requests[0], server.requests[-1]
    assert f"\r\nauthorization: bearer {SECRET}\r\n".encode() in with_token.lower()
    assert SECRET.encode() not in with_token.split(b"\r\n")[0]
    assert b"authorization" not in without.lower()


def test_a_token_that_was_replaced_in_its_file_is_found_without_a_restart(tmp_path: Path) -> None:
    tokens, file = tmp_path / "tokens.json", tmp_path / "token"
    old_id, old = add_token(tokens, "consumer")
    file.write_text(old + "\n")
    with BrokerProcess(tmp_path / "data", "--tokens", str(tokens)) as broker:
        address = BrokerAddress(url=broker.url, token_file=str(file))
        with closing(HttpTransport(address)) as transport:
            assert transport.pull(PULL).messages == ()
            file.write_text(add_token(tokens, "consumer")[1])
            broker.wait_for(" tokens_read ")
            run_token("revoke", old_id, "--tokens", str(tokens))
            broker.wait_for(" tokens_read ")
            assert transport.pull(PULL).messages == ()
            file.write_text(SECRET)
            assert transport.pull(PULL).messages == (), "the one known is good: no reason to look"
            run_token("revoke", _ids(tokens), "--tokens", str(tokens))
            broker.wait_for(" tokens_read ")
            with pytest.raises(BrokerAccessError) as caught:
                transport.pull(PULL)
    assert caught.value.status == 401
    assert "qmq broker token add" in str(caught.value)
    assert SECRET not in str(caught.value)


def _ids(tokens: Path) -> str:
    return run_token("list", "--tokens", str(tokens)).split()[0]


@pytest.mark.parametrize(
    ("url", "is_in_clear"),
    [
        ("http://127.0.0.1:1", False),
        ("http://localhost", False),
        ("http://[::1]:1", False),
        ("http://10.0.0.1", True),
        ("http://broker", True),
        ("https://broker", False),
    ],
)
def test_it_is_known_who_may_listen_on_the_way(url: str, is_in_clear: bool) -> None:
    assert BrokerAddress(url=url).is_in_clear is is_in_clear
