"""`qmq doctor`: finds settings and states of databases and broker that endanger the guarantees."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from qmq_client.commands.exit_codes import ATTENTION, DONE, exit_code_of
from qmq_client.commands.settings import database_options, json_option, loaded
from qmq_client.database.engine import open_engine, section_tables
from qmq_client.database.errors import database_errors
from qmq_client.doctor import Finding, Severity, examine_configured
from qmq_client.doctor.broker import broker as examine_broker
from qmq_client.doctor.catalogue import checked_by_command
from qmq_client.errors import ConfigurationError, DatabaseUnavailableError
from qmq_client.settings.config import LoadedConfig
from qmq_client.settings.sections import DatabaseSection
from qmq_client.transport.address import BrokerAddress

_MARKS = {Severity.BREAKS: "BREAKS", Severity.RISK: "risk", Severity.NOTE: "note"}


@click.command()
@database_options
@json_option
@click.option("--broker", "broker_url", metavar="URL", help="Examine the broker there too.")
def doctor(
    database: str | None, config_file: Path | None, as_json: bool, broker_url: str | None
) -> None:
    """Find settings and states that endanger the guarantees, and say how to fix them.

    Checks all configured databases, or --database, and the broker if one is configured.
    Changes nothing. Exit code 0 when sound, 1 for findings, 3 when a database does not answer.
    """
    known = loaded(config_file, () if database is None else (database,))
    address = _broker(known, broker_url)
    if not known.config.databases and address is None:
        raise ConfigurationError(
            setting="--database",
            value="no database and no broker is configured",
            remedy="Give --database with a URL, or --broker.",
        )
    exit_code = DONE
    for section in known.config.databases:
        try:
            where, findings = _examined(section)
        except DatabaseUnavailableError as error:  # the others are checked nevertheless
            _show_error(section.name, error, as_json=as_json)
            exit_code = exit_code_of(error)
            continue
        _show(section.name, where, findings, as_json=as_json)
        exit_code = max(exit_code, _exit_code(findings))
    if address is not None:
        findings = tuple(examine_broker(address))
        _show("broker", "broker", findings, as_json=as_json)
        exit_code = max(exit_code, _exit_code(findings))
    raise SystemExit(exit_code)


def _broker(known: LoadedConfig, given_url: str | None) -> BrokerAddress | None:
    """The broker's address, if one was named, with the configured credentials."""
    if given_url is None and not known.is_given("broker.url"):
        return None
    address = BrokerAddress.of_section(known.config.broker)
    return address if given_url is None else replace(address, url=given_url)


def _examined(section: DatabaseSection) -> tuple[str, tuple[Finding, ...]]:
    """The kind of the database as in the catalogue, and the findings."""
    engine = open_engine(section, os.environ)
    try:
        with database_errors(section.name):
            findings = examine_configured(engine, section_tables(section))
    finally:
        engine.dispose()
    kind = engine.dialect.name
    return "mysql" if kind == "mariadb" else kind, findings


def _exit_code(findings: Sequence[Finding]) -> int:
    return ATTENTION if any(one.severity is not Severity.NOTE for one in findings) else DONE


def _show(name: str, where: str, findings: Sequence[Finding], *, as_json: bool) -> None:
    if as_json:
        found = [finding.as_json() for finding in findings]
        click.echo(json.dumps({"name": name, "ok": not findings, "findings": found}))
        return
    if not findings:
        click.echo(f"{name}: sound ({_checked(where)})")
    for finding in findings:
        promise = f" {finding.promise}" if finding.promise else ""
        click.echo(f"{name}: {_MARKS[finding.severity]}{promise} {finding.id}: {finding.read}")
        click.echo(f"  {finding.meaning}\n  fix: {finding.fix}")


def _checked(where: str) -> str:
    """The number of checks, for a line without findings."""
    counts = checked_by_command(where)
    total = f"{sum(counts.values())} checks"
    if where == "broker":
        return f"{total}; of delayed messages and archives only if you may see all subjects"
    return f"{total}: " + ", ".join(f"{kind} {count}" for kind, count in counts.items())


def _show_error(name: str, error: DatabaseUnavailableError, *, as_json: bool) -> None:
    text = " ".join(str(error).split())
    if as_json:
        click.echo(json.dumps({"name": name, "ok": False, "error": text}))
    else:
        click.echo(f"Error: {text}", err=True)
