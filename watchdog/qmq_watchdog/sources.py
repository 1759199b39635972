"""All databases of the configuration and the registry at this moment, for one pass.

The daemon follows the same two sources in `fleet.py`, as they change.
"""

from __future__ import annotations

from collections.abc import Mapping

from qmq_client.errors import ConfigurationError, DatabaseUnavailableError, QmqError
from qmq_client.settings.sections import Config
from qmq_watchdog.databases import Database, open_database
from qmq_watchdog.registry import Registry
from qmq_watchdog.registry_job import REGISTRY_JOB


def open_all(
    config: Config, environment: Mapping[str, str]
) -> tuple[list[Database], dict[str, QmqError]]:
    """The databases, and by name the reasons why others cannot be opened."""
    sections = {section.name: section for section in config.databases}
    refused: dict[str, QmqError] = {}
    if config.registry.url:
        try:
            content = Registry(config.registry, environment, config.watchdog).read()
        except (ConfigurationError, DatabaseUnavailableError) as error:
            refused[REGISTRY_JOB] = error
        else:
            refused |= content.refused
            sections = {section.name: section for section in content.enabled()} | sections
    databases = []
    for name, section in sections.items():
        try:
            databases.append(open_database(section, environment, config.watchdog))
        except ConfigurationError as error:
            refused[name] = error
    return databases, refused
