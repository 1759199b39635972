"""TLS of a real broker: who is spoken to, who is not, and a certificate that is renewed."""

from __future__ import annotations

import contextlib
import shutil
import signal
import ssl
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import msgspec
import pytest

from qmq_broker.face.authentication.tls import TlsContext
from qmq_broker.options import TlsOptions
from qmq_client.certificate import validity_of
from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.errors import BrokerAccessError, BrokerUnreachableError, ConfigurationError
from qmq_client.transport.address import BrokerAddress
from qmq_client.transport.http import HttpTransport
from qmq_client.transport.json_questions import ask
from qmq_client.transport.tls import ClientTls
from qmq_client.wire.record import decode_record
from qmq_client.wire.requests import PullRequest
from tests.broker.face.guard import Authority, add_token, run_token
from tests.broker.service.rig import SUBJECT, make_frame
from tests.kit.broker_process import SERVE_WITH_FAULTS, BrokerProcess, read_all
from tests.kit.waiting import DEADLINE_S, wait_for

PULL = PullRequest(subject="orders", group="g", consumer="c")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


def pull(url: str, **access: str) -> int:
    """How many messages a pull gets; raises what the transport raises."""
    transport = HttpTransport(
        BrokerAddress(url=url, **access), connect_timeout_s=DEADLINE_S, answer_timeout_s=DEADLINE_S
    )
    try:
        return len(transport.pull(PULL).messages)
    finally:
        transport.close()


def context(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.file))


def serial(broker: BrokerProcess, authority: Authority) -> object:
    """The serial number of the certificate that a new connection is shown."""
    with (
        broker.connection() as plain,
        context(authority).wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        shown = connection.getpeercert()
        assert shown is not None
        return shown["serialNumber"]


def test_a_client_speaks_to_the_broker_that_its_authority_vouches_for_and_to_no_other(
    tmp_path: Path, authority: Authority
) -> None:
    tokens = tmp_path / "tokens.json"
    text = add_token(tokens, "consumer")[1]
    other = Authority(tmp_path / "other")
    options = ["--tokens", str(tokens), *authority.server_options("127.0.0.1")]
    with BrokerProcess(tmp_path / "data", *options) as broker:
        assert broker.url.startswith("https://")
        assert pull(broker.url, token=text, ca_file=str(authority.file)) == 0
        with pytest.raises(BrokerUnreachableError, match=r"not accepted.*ca_file"):
            pull(broker.url, token=text, ca_file=str(other.file))
        with pytest.raises(BrokerUnreachableError, match="not accepted"):
            pull(broker.url, token=text)
        with pytest.raises(BrokerUnreachableError, match="not accepted"):
            pull(broker.url.replace("127.0.0.1", "localhost"), ca_file=str(authority.file))
        with pytest.raises(BrokerAccessError, match="QMQ_BROKER_TOKEN"):
            pull(broker.url, ca_file=str(authority.file))
        assert text not in broker.log


def test_long_bodies_come_and_go_whole_through_tls(tmp_path: Path, authority: Authority) -> None:
    bodies = [bytes([index]) * 150_000 for index in range(4)]
    with BrokerProcess(tmp_path / "data", *authority.server_options("127.0.0.1")) as broker:
        transport = HttpTransport(BrokerAddress(url=broker.url, ca_file=str(authority.file)))
        try:
            for pair in (bodies[:2], bodies[2:]):  # longer than what the loop waits for without TLS
                assert transport.send(make_frame(pair)).count == 2
            pulled = transport.pull(msgspec.structs.replace(PULL, max_messages=4)).messages
        finally:
            transport.close()
        assert [decode_record(SUBJECT, one.record).body for one in pulled] == bodies
        assert broker.stop() == 0


def test_old_versions_of_tls_and_plain_http_get_no_answer(
    tmp_path: Path, authority: Authority
) -> None:
    with BrokerProcess(tmp_path / "data", *authority.server_options()) as broker:
        old = context(authority)
        old.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning, match="TLSv1"):
            old.minimum_version = ssl.TLSVersion.TLSv1
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with broker.connection() as plain, pytest.raises(ssl.SSLError):
            old.wrap_socket(plain, server_hostname="127.0.0.1")
        answer = broker.talk(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b"200" not in answer
        assert broker.talk(b"\x16\x03\x01\x40\x00\x01" + b"\xff" * 500)[:4] != b"HTTP"
        with httpx.Client(verify=context(authority), timeout=DEADLINE_S) as client:
            assert client.get(f"{broker.url}/healthz").status_code == 200
        assert broker.stop() == 0
        assert "Traceback" not in broker.log


def test_the_context_knows_no_old_version_even_where_the_library_does(
    authority: Authority,
) -> None:
    certificate, key = authority.issue("a.example", as_file="a")
    for client_ca in ("", str(authority.file)):
        made = TlsContext(
            TlsOptions(certificate_file=certificate, key_file=key, client_ca_file=client_ca),
            SYSTEM_CLOCK.now_ms,
        )
        assert made.context.minimum_version is ssl.TLSVersion.TLSv1_2
        wanted = ssl.CERT_REQUIRED if client_ca else ssl.CERT_NONE
        assert made.context.verify_mode is wanted
    address = BrokerAddress(url="https://a.example", ca_file=str(authority.file))
    for context in (address.ssl_context(), BrokerAddress(url="https://a.example").ssl_context()):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.check_hostname


def test_a_renewed_certificate_is_taken_without_a_restart_and_a_broken_one_is_not(
    tmp_path: Path, authority: Authority
) -> None:
    options = authority.server_options()
    with BrokerProcess(tmp_path / "data", *options) as broker:
        first = serial(broker, authority)
        assert serial(broker, authority) == first
        authority.server_options()
        broker.wait_for(" certificate_read ")
        second = serial(broker, authority)
        assert second != first
        Path(options[3]).write_text("no key")
        broker.wait_for(" certificate_not_read ")
        assert serial(broker, authority) == second


@pytest.mark.parametrize("client_ca", [False, True])
@pytest.mark.parametrize(
    ("years", "reason"), [((-2, -1), "has expired"), ((1, 2), "not yet valid"), ((-1, 1), "")]
)
def test_a_certificate_that_every_client_refuses_for_its_time_is_logged_when_it_is_loaded(
    authority: Authority,
    caplog: pytest.LogCaptureFixture,
    years: tuple[int, int],
    reason: str,
    client_ca: bool,
) -> None:
    first, last = (datetime.now(UTC) + timedelta(days=365 * each) for each in years)
    certificate, key = authority.issue(
        "127.0.0.1", as_file="server", not_before=first, not_after=last
    )
    ca = str(authority.file) if client_ca else ""
    options = TlsOptions(certificate_file=certificate, key_file=key, client_ca_file=ca)
    TlsContext(options, SYSTEM_CLOCK.now_ms)
    told = [one.getMessage() for one in caplog.records]
    assert [one.split()[0] for one in told] == (["certificate_out_of_date"] if reason else [])
    assert not reason or reason in told[0]


@pytest.mark.parametrize("year", [2040, 2080])
def test_a_certificate_that_expires_while_the_broker_runs_is_logged_before_and_then(
    authority: Authority, caplog: pytest.LogCaptureFixture, year: int
) -> None:
    last = datetime(year, 3, 1, 12, tzinfo=UTC)
    first = last - timedelta(days=90)
    certificate, key = authority.issue("a", as_file="server", not_before=first, not_after=last)
    days = [89, 15, 13, 12, 1, 0, -1, -2]
    times = iter([int((last - timedelta(days=one)).timestamp()) * 1000 for one in days])
    tls = TlsContext(TlsOptions(certificate_file=certificate, key_file=key), lambda: next(times))
    for _ in days[1:]:
        assert not tls.step()
    told = [one.getMessage() for one in caplog.records]
    assert [one.split()[0] for one in told] == ["certificate_ends_soon", "certificate_out_of_date"]
    assert "13 days" in told[0]
    assert "has expired" in told[1]


@pytest.mark.parametrize(
    ("years", "reason"), [((-2, -1), "has expired"), ((1, 2), "not yet valid")]
)
def test_a_client_that_refuses_a_certificate_for_its_time_says_so(
    tmp_path: Path, authority: Authority, years: tuple[int, int], reason: str
) -> None:
    first, last = (datetime.now(UTC) + timedelta(days=365 * each) for each in years)
    certificate, key = authority.issue(
        "127.0.0.1", as_file="server", not_before=first, not_after=last
    )
    options = ["--tls-cert", certificate, "--tls-key", key]
    with (
        BrokerProcess(tmp_path / "data", *options) as broker,
        pytest.raises(BrokerUnreachableError, match=rf"{reason}\. Renew it at the broker"),
    ):
        pull(broker.url, ca_file=str(authority.file))


def test_bytes_that_are_no_certificate_have_no_validity() -> None:
    for der in (
        b"",
        b"\x30",
        b"\x30\x80",
        b"\x30\x03\x30\x01\x02",
        bytes(64),
        b"\x30\x84" + b"\xff" * 4,
    ):
        with pytest.raises(ValueError, match=r"."):
            validity_of(ssl.DER_cert_to_PEM_cert(der))
    with pytest.raises(ValueError, match="no certificate in PEM"):
        validity_of("")


def test_failed_handshakes_are_logged_once_for_each_kind(
    tmp_path: Path, authority: Authority
) -> None:
    with BrokerProcess(tmp_path / "data", *authority.server_options()) as broker:
        for _ in range(2):
            with broker.connection() as plain:
                plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
                read_all(plain)
        broker.wait_for(" handshake_failed ")
        assert broker.log.count("kind=HTTP_REQUEST") == 1
        with pytest.raises(ssl.SSLError), broker.connection() as plain:
            ssl.create_default_context().wrap_socket(plain, server_hostname="127.0.0.1")
        broker.wait_for("kind=TLSV1_ALERT_UNKNOWN_CA")


def test_clients_of_an_authority_that_was_replaced_are_let_in_no_longer(
    tmp_path: Path, authority: Authority
) -> None:
    before, after = Authority(tmp_path / "before"), Authority(tmp_path / "after")
    clients = Path(shutil.copy(before.file, tmp_path / "clients.pem"))
    options = [*authority.server_options(), "--tls-client-ca", str(clients)]
    pairs = [one.issue("shop.example", as_file="client") for one in (before, after)]
    old, new = (
        {"ca_file": str(authority.file), "cert_file": pair[0], "key_file": pair[1]}
        for pair in pairs
    )
    with BrokerProcess(tmp_path / "data", *options) as broker:
        assert pull(broker.url, **old) == 0
        with pytest.raises(BrokerUnreachableError, match="does not accept"):
            pull(broker.url, **new)
        after.file.replace(clients)
        broker.wait_for(" certificate_read ")
        assert pull(broker.url, **new) == 0
        with pytest.raises(BrokerUnreachableError, match="does not accept"):
            pull(broker.url, **old)
        clients.write_text("no certificate")
        broker.wait_for(" certificate_not_read ")
        assert pull(broker.url, **new) == 0
        draft = Path(shutil.copy(before.file, tmp_path / "draft.pem"))
        draft.chmod(0o666)
        draft.replace(clients)
        broker.wait_for("every user may write it")
        assert pull(broker.url, **new) == 0
        clients.chmod(0o600)
        broker.wait_for(" certificate_read ")
        assert pull(broker.url, **old) == 0


def test_B10_a_handshake_that_does_not_come_is_ended(tmp_path: Path, authority: Authority) -> None:
    options = [*authority.server_options(), "--head-ms", "2000"]
    with (
        BrokerProcess(tmp_path / "data", *options, command=SERVE_WITH_FAULTS) as broker,
        broker.connection(timeout_s=30.0) as silent,
        broker.connection(timeout_s=30.0) as half,
    ):
        half.sendall(b"\x16\x03\x01")
        assert read_all(silent) == b""
        assert read_all(half) == b""
        with httpx.Client(verify=context(authority), timeout=DEADLINE_S) as client:
            assert client.get(f"{broker.url}/healthz").status_code == 200


def test_B10_handshakes_count_as_connections_and_too_many_are_ended_at_once(
    tmp_path: Path, authority: Authority
) -> None:
    options = [*authority.server_options(), "--head-ms", "60000", "--connections", "4"]
    with (
        BrokerProcess(tmp_path / "data", *options, command=SERVE_WITH_FAULTS) as broker,
        contextlib.ExitStack() as stack,
    ):
        half = [stack.enter_context(broker.connection()) for _ in range(4)]
        for connection in half:
            connection.sendall(b"\x16\x03\x01")
        surplus = stack.enter_context(broker.connection())
        assert read_all(surplus) == b""
        half.pop().close()
        with httpx.Client(verify=context(authority), timeout=DEADLINE_S) as client:
            for _ in range(3):
                with contextlib.suppress(httpx.TransportError):  # until it has seen the close
                    assert client.get(f"{broker.url}/healthz").status_code == 200
                    break
            else:
                pytest.fail("the place is not given back")
        assert broker.stop() == 0, "the others do not keep it"


def test_B10_who_does_not_read_an_answer_through_tls_is_left(
    tmp_path: Path, authority: Authority
) -> None:
    with BrokerProcess(
        tmp_path / "data", *authority.server_options(), command=SERVE_WITH_FAULTS
    ) as broker:
        message = {"subject": "big", "body": "x" * 1_000_000}
        with httpx.Client(
            verify=context(authority), base_url=broker.url, timeout=DEADLINE_S
        ) as client:
            for _ in range(8):
                assert client.post("/v1/send", json={"messages": [message]}).status_code == 200
        with (
            broker.connection() as plain,
            context(authority).wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        ):
            # One answer, of which the system's own buffers hold less than half.
            path = f"/v1/files/read?path=commitlog/{0:020}&first=0&count=8000000"
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
            broker.wait_for("reason=unread connections=1")


def test_a_request_that_comes_with_the_end_of_the_handshake_is_answered(
    tmp_path: Path, authority: Authority
) -> None:
    with BrokerProcess(tmp_path / "data", *authority.server_options()) as broker:
        for _ in range(20):
            with (
                broker.connection() as plain,
                context(authority).wrap_socket(plain, server_hostname="127.0.0.1") as connection,
            ):
                # With TLS 1.3 the client's part of the handshake may be read together with this.
                connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                assert b"HTTP/1.1 200" in read_all(connection)


def test_with_a_client_authority_only_its_clients_are_let_in_by_the_name_in_their_certificate(
    tmp_path: Path, authority: Authority
) -> None:
    tokens = tmp_path / "tokens.json"
    run_token(
        "add",
        "shop",
        "--tokens",
        str(tokens),
        "--role",
        "consumer",
        "--certificate",
        "shop.example",
    )
    text = add_token(tokens, "consumer")[1]
    options = ["--tokens", str(tokens), *authority.server_options()]
    options += ["--tls-client-ca", str(authority.file)]
    ca = {"ca_file": str(authority.file)}
    with BrokerProcess(tmp_path / "data", *options) as broker:
        known = authority.issue("shop.example", as_file="known")
        named = authority.issue("x.example", as_file="named", common_name="shop.example")
        unknown = authority.issue("other.example", as_file="unknown")
        foreign = Authority(tmp_path / "foreign").issue("shop.example", as_file="foreign")

        def as_(pair: tuple[str, str]) -> dict[str, str]:
            return {**ca, "cert_file": pair[0], "key_file": pair[1]}

        assert pull(broker.url, **as_(known)) == 0
        assert pull(broker.url, **as_(named)) == 0
        assert pull(broker.url, **as_(unknown), token=text) == 0
        with pytest.raises(BrokerAccessError):
            pull(broker.url, **as_(unknown))
        with pytest.raises(BrokerAccessError):
            pull(broker.url, **as_(known), token=text[:-1] + "z")
        with pytest.raises(BrokerUnreachableError, match=f"does not accept .* {foreign[0]}"):
            pull(broker.url, **as_(foreign))
        with pytest.raises(BrokerUnreachableError, match=r"give broker\.cert_file and broker\.key"):
            pull(broker.url, **ca, token=text)
        assert "Traceback" not in broker.log


def test_a_client_says_that_its_certificate_has_expired_and_takes_the_renewed_one(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    last = datetime.now(UTC) - timedelta(days=1)
    first = last - timedelta(days=90)
    certificate, key = authority.issue(
        "shop.example", as_file="client", not_before=first, not_after=last
    )
    options = [*authority.server_options(), "--tls-client-ca", str(authority.file)]
    with BrokerProcess(tmp_path / "data", *options) as broker:
        address = BrokerAddress(
            url=broker.url, ca_file=str(authority.file), cert_file=certificate, key_file=key
        )
        with contextlib.closing(HttpTransport(address)) as transport:
            assert [one.getMessage() for one in caplog.records] == [
                f"broker.cert_file {certificate}: certificate has expired"
            ]
            with pytest.raises(BrokerUnreachableError, match=f"{certificate} has expired"):
                transport.pull(PULL)
            with pytest.raises(BrokerUnreachableError, match=f"{certificate} has expired"):
                ask("GET", address, "/v1/room", answer_s_max=DEADLINE_S, answer_bytes_max=1000)
            Path(certificate).write_text("no certificate")
            with pytest.raises(BrokerUnreachableError):
                transport.pull(PULL)
            assert "the previous one stays" in caplog.text
            authority.issue("shop.example", as_file="client")
            assert transport.pull(PULL).messages == ()


def test_a_broker_that_dies_is_not_said_to_ask_for_a_certificate(
    tmp_path: Path, authority: Authority
) -> None:
    """It has taken a call on this connection before."""
    with (
        BrokerProcess(tmp_path / "data", *authority.server_options()) as broker,
        contextlib.closing(
            HttpTransport(BrokerAddress(url=broker.url, ca_file=str(authority.file)))
        ) as transport,
        ThreadPoolExecutor(1) as pool,
    ):
        transport.pull(PULL)
        broker.send_signal(signal.SIGSTOP)
        answer = pool.submit(transport.pull, PULL)
        wait_for(lambda: transport._connections and not transport._connections._kept._idle)
        broker.kill()
        with pytest.raises(BrokerUnreachableError) as caught:
            answer.result(DEADLINE_S)
    assert "certificate" not in str(caught.value)


def test_a_broker_does_not_start_with_a_certificate_that_it_cannot_use(
    tmp_path: Path, authority: Authority
) -> None:
    certificate, key = authority.issue("a.example", as_file="a")
    _, other_key = authority.issue("b.example", as_file="b")
    for pair in ((certificate, other_key), (certificate, "gone"), (key, certificate)):
        broker = BrokerProcess(tmp_path / "data", "--tls-cert", pair[0], "--tls-key", pair[1])
        assert broker.run_to_end() == 2
        assert "PEM" in broker.log
    assert not (tmp_path / "data").exists()


def test_beyond_this_machine_a_broker_needs_tokens_and_tls(
    tmp_path: Path, authority: Authority
) -> None:
    tokens = tmp_path / "tokens.json"
    add_token(tokens, "admin")
    both = (["--tokens", str(tokens)], authority.server_options())
    for given, missing in ((both[0], "--tls-cert"), (both[1], "--tokens"), ([], "--tokens and")):
        broker = BrokerProcess(tmp_path / "data", *given, listen="0.0.0.0:0")
        assert broker.run_to_end() == 2
        assert missing in " ".join(broker.log.split())
    with BrokerProcess(tmp_path / "data", *both[0], *both[1], listen="0.0.0.0:0") as broker:
        assert serial(broker, authority)


@pytest.mark.parametrize("files", [{"ca_file": "gone.pem"}, {"cert_file": "gone.pem"}])
def test_files_that_a_client_cannot_use_are_named(tmp_path: Path, files: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match=r"gone\.pem"):
        HttpTransport(BrokerAddress(url="https://127.0.0.1:1", **files))


def test_a_client_takes_a_renewed_certificate_that_it_may_read_only_later(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = authority.issue("shop.example", as_file="client")
    tls = ClientTls(client_address(authority, certificate, key))
    before = tls.context()
    authority.issue("shop.example", as_file="client")
    with monkeypatch.context() as unreadable:
        unreadable.setattr(BrokerAddress, "ssl_context", refuse)
        assert tls.context() is before
    Path(key).chmod(0o640)
    assert tls.context() is not before


def test_a_thread_that_read_older_files_does_not_undo_what_another_read_since(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = authority.issue("shop.example", as_file="client")
    tls = ClientTls(client_address(authority, certificate, key))
    read = BrokerAddress.ssl_context
    made: list[ssl.SSLContext] = []

    def slowly(address: BrokerAddress) -> ssl.SSLContext:
        made.append(read(address))
        if len(made) == 1:
            authority.issue("shop.example", as_file="client")
            assert tls.context() is made[1]  # as another thread does
            return made[0]
        return made[-1]

    authority.issue("shop.example", as_file="client")
    monkeypatch.setattr(BrokerAddress, "ssl_context", slowly)
    assert tls.context() is made[0]
    assert tls.context() is made[2]


def client_address(authority: Authority, certificate: str, key: str) -> BrokerAddress:
    return BrokerAddress(
        url="https://127.0.0.1:1", ca_file=str(authority.file), cert_file=certificate, key_file=key
    )


def refuse(address: BrokerAddress) -> ssl.SSLContext:
    raise ConfigurationError(setting="broker.key_file", value=address.key_file, remedy="chmod")
