"""`qmq broker serve | token`: the commands that need access to the broker's files.

The commands that only send requests to a running broker, `status`, `readonly` and `drain`, are in the client.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import click

from qmq_broker.face.commands.token import token
from qmq_broker.options import (
    RETAIN_MS_MAX,
    RETAIN_MS_MIN,
    SEGMENT_BYTES,
    SEGMENT_BYTES_MAX,
    SEGMENT_MULTIPLE_BYTES,
    ServeOptions,
    StoreOptions,
    TlsOptions,
    room_for_a_frame_bytes,
)
from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.wire.limits import DEFAULT_LIMITS
from qmq_client.wire.loopback import is_loopback

_Function = TypeVar("_Function", bound=Callable[..., Any])
DEFAULT_LISTEN = "127.0.0.1:9470"
_HOUR_MS = 3_600_000
#: The shortest segment that takes the largest frame.
SEGMENT_BYTES_MIN = room_for_a_frame_bytes(DEFAULT_LIMITS)
_SEGMENT_RULE = (
    f"a multiple of {SEGMENT_MULTIPLE_BYTES}, from {SEGMENT_BYTES_MIN} (room for the largest frame) "
    f"to {SEGMENT_BYTES_MAX}"
)


def _check_segment_bytes(_: click.Context, __: click.Parameter, value: int | None) -> int | None:
    """Check both parts of the rule at once, so that the error names both."""
    if value is None:
        return None
    if value % SEGMENT_MULTIPLE_BYTES or not SEGMENT_BYTES_MIN <= value <= SEGMENT_BYTES_MAX:
        raise click.BadParameter(f"{value}; allowed: {_SEGMENT_RULE}.")
    return value


def _check_retain_hours(_: click.Context, __: click.Parameter, value: float | None) -> float | None:
    """Check the value in hours, as given: the store's options are in milliseconds."""
    if value is not None and not RETAIN_MS_MIN <= value * _HOUR_MS <= RETAIN_MS_MAX:
        least, most = RETAIN_MS_MIN / _HOUR_MS, RETAIN_MS_MAX // _HOUR_MS
        raise click.BadParameter(f"{value:g}; allowed: {least:.4f} (a second) to {most} hours.")
    return value


def tls_options(function: _Function) -> _Function:
    """Add the three options of TLS; the command gets them as one value, `tls`."""

    @wraps(function)
    def with_tls(*, tls_cert: str, tls_key: str, tls_client_ca: str, **others: Any) -> Any:
        tls = None
        if tls_cert or tls_key or tls_client_ca:
            if not (tls_cert and tls_key):
                raise click.UsageError(
                    "TLS needs both --tls-cert and --tls-key: give the missing one."
                )
            tls = TlsOptions(
                certificate_file=tls_cert, key_file=tls_key, client_ca_file=tls_client_ca
            )
        return function(tls=tls, **others)

    for name, text in (
        ("--tls-client-ca", "Accept only clients with a certificate from these authorities."),
        ("--tls-key", "Its private key, PEM, not encrypted."),
        ("--tls-cert", "Serve TLS with this certificate chain, PEM; reloaded when it changes."),
    ):
        with_tls = click.option(name, default="", metavar="FILE", help=text)(with_tls)
    return cast("_Function", with_tls)


@click.group()
def broker() -> None:
    """Run a broker: one process, one data directory."""


@broker.command()
@click.option(
    "--data",
    "directory",
    required=True,
    type=click.Path(file_okay=False),
    help="Data directory; created if it does not exist.",
)
@click.option(
    "--listen",
    default=DEFAULT_LISTEN,
    show_default=True,
    help="HOST:PORT; port 0 takes a free one.",
)
@click.option(
    "--tokens",
    "tokens_file",
    default="",
    metavar="FILE",
    help="Refuse callers without a token from this file; see `qmq broker token`.",
)
@tls_options
@click.option(
    "--insecure",
    is_flag=True,
    help="Allow listening beyond this machine without tokens or TLS.",
)
@click.option(
    "--segment-bytes",
    type=int,
    callback=_check_segment_bytes,
    help=f"Length of a commit log segment of a new directory: {_SEGMENT_RULE}; {SEGMENT_BYTES} by "
    "default. An existing directory keeps its own.",
)
@click.option("--reserve-bytes", type=int, help="Free disk space below which messages are refused.")
@click.option(
    "--retain-hours",
    type=float,
    callback=_check_retain_hours,
    help="Age at which segments of the commit log are deleted; 72 by default.",
)
@click.option(
    "--retain-bytes",
    type=int,
    help="Length of the commit log above which the oldest segments are deleted.",
)
@click.option(
    "--force-retention",
    is_flag=True,
    help="Delete even what a consumer group has not received yet; its losses are counted.",
)
@click.option(
    "--index-entries",
    type=int,
    help="Entries per file of the key index; 2000000 by default (42 MB); 0 for no key index.",
)
@click.option(
    "--drain-ms",
    type=int,
    default=10_000,
    show_default=True,
    help="How long a stop waits for requests in progress.",
)
@click.option("--read-only", is_flag=True, help="Serve pulls and settlements, but refuse messages.")
@click.option(
    "--quarantine",
    is_flag=True,
    help="Give up damaged ranges of the logs, after copying and reporting them to quarantine/.",
)
@click.option(
    "--log-level",
    default="info",
    show_default=True,
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="Lowest level that is logged.",
)
def serve(  # noqa: PLR0913  # one argument for each option
    *,
    directory: str,
    listen: str,
    tokens_file: str,
    tls: TlsOptions | None,
    insecure: bool,
    segment_bytes: int | None,
    reserve_bytes: int | None,
    retain_hours: float | None,
    retain_bytes: int | None,
    force_retention: bool,
    index_entries: int | None,
    drain_ms: int,
    read_only: bool,
    quarantine: bool,
    log_level: str,
) -> None:
    """Serve until SIGTERM or SIGINT.

    Exit codes: 0 stopped cleanly, 1 stopped early, 2 bad usage, tokens or certificate, or too few
    open files, 3 data directory in use or of another version, 4 accepted data is damaged, 5 a write
    or sync failed, 6 address in use.
    """
    host, port = _parse_listen(listen)
    if not insecure:
        _check_reach(listen, host, has_tokens=bool(tokens_file), has_tls=tls is not None)
    of_store = _given(
        segment_bytes=segment_bytes,
        reserve_bytes=reserve_bytes,
        retain_ms=None if retain_hours is None else round(retain_hours * _HOUR_MS),
        retain_bytes=retain_bytes,
        index_entries=index_entries,
    )
    try:
        options = ServeOptions(
            directory=directory,
            host=host,
            port=port,
            tokens_file=tokens_file,
            tls=tls,
            is_read_only=read_only,
            is_quarantining=quarantine,
            store=StoreOptions(**of_store, force_retention=force_retention),
            drain_ms=drain_ms,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    # Late: `qmq --help` lists this command without loading the web server.
    from qmq_broker.face.logs import start_logging
    from qmq_broker.face.server import serve as serve_until_stopped

    start_logging(logging.getLevelNamesMapping()[log_level.upper()])
    sys.exit(serve_until_stopped(options, SYSTEM_CLOCK))


def _given(**options: int | None) -> dict[str, Any]:
    """The given options; the others have their defaults."""
    return {name: value for name, value in options.items() if value is not None}


def _parse_listen(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdecimal() or int(port) > 65_535:
        raise click.UsageError(f"--listen {listen}: give HOST:PORT, for example {DEFAULT_LISTEN}")
    return host, int(port)


def _check_reach(listen: str, host: str, *, has_tokens: bool, has_tls: bool) -> None:
    """Refuse an address that other machines can reach without authentication, or without TLS."""
    missing = [
        what
        for what, is_there in (("--tokens", has_tokens), ("--tls-cert and --tls-key", has_tls))
        if not is_there
    ]
    if missing and not is_loopback(host):
        raise click.UsageError(
            f"--listen {listen}: {host} can be reached from other machines, which needs "
            f"authentication and TLS. Add {' and '.join(missing)}, listen on 127.0.0.1, or add "
            "--insecure when the network is trusted."
        )


broker.add_command(token)
