"""`qmq broker status | readonly | drain`: a running broker, asked over its own HTTP.

Exit codes as everywhere: 0 done, 1 it is in a state that serves nobody, 2 wrong call, 3 not reached.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Final

import click

from qmq_broker.face.commands.address import (
    DEFAULT_BROKER,
    broker_option,
    configured_headers,
    configured_tls,
)

_WAIT_S: Final = 10.0
_NOT_SERVING: Final = 1
_UNREACHABLE: Final = 3

_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


@click.command()
@broker_option
@_json_option
def status(url: str, as_json: bool) -> None:
    """Say what the broker serves now, and if it does not, why.

    Exit codes: 0 it serves (a read-only one its consumers), 1 it serves nobody, 2 wrong call, 3 no
    broker answers.
    """
    code, answer = _ask("GET", f"{url}/readyz")
    _show(answer, as_json)
    if code != 200:
        sys.exit(_NOT_SERVING)


@click.command()
@click.argument("switch", type=click.Choice(["on", "off"]))
@click.option("--reason", default="", help="Shown to the producers that are refused.")
@broker_option
@_json_option
def readonly(switch: str, reason: str, url: str, as_json: bool) -> None:
    """Take no messages, or take them again; pulls and settlements go on.

    Lasts until the broker's next start, which goes by its own options. Exit codes: 0 it is so now,
    1 the broker refused, 2 wrong call, 3 no broker answers.
    """
    state = "read-only" if switch == "on" else "serving"
    _change(url, state, reason, as_json)


@click.command()
@click.option("--reason", default="", help="Shown to those that are refused.")
@broker_option
@_json_option
def drain(reason: str, url: str, as_json: bool) -> None:
    """Stop in order: no more messages, waiting pulls are answered, then the process ends.

    Exit codes: 0 it began to, 1 the broker refused, 2 wrong call, 3 no broker answers.
    """
    _change(url, "draining", reason, as_json)


def _change(url: str, state: str, reason: str, as_json: bool) -> None:
    code, answer = _ask("POST", f"{url}/v1/state", {"state": state, "reason": reason})
    if code != 200:
        remedy = f" {answer['remedy']}" if answer.get("remedy") else ""
        click.echo(f"the broker refused: {answer.get('message', answer)}.{remedy}", err=True)
        sys.exit(_NOT_SERVING)
    _show(answer, as_json)


def _show(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(answer))
        return
    reason = answer.get("reason")
    click.echo(f"{answer.get('status')}{f': {reason}' if reason else ''}")


def _ask(method: str, url: str, body: object = None) -> tuple[int, dict[str, Any]]:
    import httpx  # late: `qmq --help` lists these commands without it

    try:
        response = httpx.request(
            method,
            url,
            json=body,
            timeout=_WAIT_S,
            headers={"accept-encoding": "identity", **configured_headers()},
            verify=configured_tls(),
            trust_env=False,  # a proxy for the web is none for the broker
        )
        answer = response.json()
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise click.UsageError(
            f"--broker {url}: {error} Give one like {DEFAULT_BROKER}."
        ) from error
    except (httpx.HTTPError, ValueError) as error:
        click.echo(
            f"no answer from a broker at {url}: {error}. "
            "Start one there, or give its address by --broker or QMQ_BROKER_URL.",
            err=True,
        )
        sys.exit(_UNREACHABLE)
    return response.status_code, answer if isinstance(answer, dict) else {}
