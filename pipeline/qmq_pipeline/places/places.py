"""Opens the log of a place, in the driver and in every worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qmq_broker.storage.files.format_file import Format
from qmq_client.errors import ConfigurationError
from qmq_client.settings.sections import BrokerSection
from qmq_client.transport.address import BrokerAddress
from qmq_pipeline.errors import OptionError
from qmq_pipeline.places.disks import LocalDisk, ReadDisk
from qmq_pipeline.places.log import LogReader
from qmq_pipeline.places.options import BROKER_OPTIONS, Place
from qmq_pipeline.places.outage import WAIT_S


def open_disk(place: Place) -> ReadDisk:
    """The files at this place, for reading."""
    if place.broker_url is not None:
        # imported late, because it imports the HTTP client, which a directory does not need
        from qmq_pipeline.places.remote import RemoteDisk

        return RemoteDisk(place.address, wait_s=place.wait_s)
    assert place.path is not None
    return LocalDisk(place.path.removeprefix("file://"))


def with_token(place: Place, environment: Mapping[str, str]) -> Place:
    """The place with the token from file or environment, because workers have neither.

    Raises `OptionError` for a token that cannot be read.
    """
    if place.broker_url is None:
        return place
    known = BrokerAddress.of(place.broker_url, environment)
    own = {name: getattr(place, name) for name in BROKER_OPTIONS}
    if own["token"] or own["token_file"]:
        known = replace(known, token="", token_file="")
    chosen = {name: own[name] or getattr(known, name) for name in BROKER_OPTIONS}
    found = replace(place, **chosen)
    try:
        return replace(found, token=found.address.current_token(), token_file="")
    except ConfigurationError as error:
        raise OptionError(
            option="token_file",
            value=error.value,
            allowed="a file that holds only a token",
            remedy="Make one with `qmq broker token add`.",
        ) from error


def broker_place(
    url: str, token_file: str | None, known: BrokerSection, wait_s: float = WAIT_S
) -> Place:
    """A broker named on the command line, with the credentials from the configuration.

    A token file of the command line takes the place of the configured token.
    """
    given = {name: getattr(known, name) for name in BROKER_OPTIONS}
    if token_file:
        given |= {"token": "", "token_file": token_file}
    return Place(broker_url=url, wait_s=wait_s, **given)


def open_log(place: Place, log: str, known: Format | None = None) -> LogReader:
    """One log at this place, of a store that may already be `known`; raises `SourceError`."""
    disk = open_disk(place)
    try:
        return LogReader(disk, log, source=place.name, known=known)
    except BaseException:
        disk.close()
        raise
