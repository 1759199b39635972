"""From the place that an option names to an open log, in the driver and in every worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from qmq_pipeline.disks import LocalDisk, ReadDisk
from qmq_pipeline.errors import OptionError
from qmq_pipeline.log import LogReader
from qmq_pipeline.options import Place
from qmq_pipeline.remote import RemoteDisk

_TOKEN_CHARACTERS_MAX: Final = 4_096


def open_disk(place: Place) -> ReadDisk:
    """The files at this place, to be read."""
    if place.broker_url is not None:
        return RemoteDisk(place.broker_url, place.token)
    assert place.path is not None
    return LocalDisk(place.path.removeprefix("file://"))


def with_token(place: Place, environment: Mapping[str, str]) -> Place:
    """The place with its token read from file or environment: workers have neither.

    Raises `OptionError` for a file that cannot be read.
    """
    if place.broker_url is None or place.token:
        return place
    token_file = place.token_file or environment.get("QMQ_BROKER_TOKEN_FILE")
    if not token_file:
        return replace(place, token=environment.get("QMQ_BROKER_TOKEN") or None)
    try:
        with open(token_file, encoding="utf-8") as file:
            token = file.read(_TOKEN_CHARACTERS_MAX).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            option="token_file",
            value=f"{token_file}: {error}",
            allowed="a file that holds a token and nothing else",
            remedy="Make one with `qmq broker token add`.",
        ) from error
    return replace(place, token=token)


def open_log(place: Place, log: str) -> LogReader:
    """One log at this place; raises `SourceError`."""
    disk = open_disk(place)
    try:
        return LogReader(disk, log, source=place.name)
    except BaseException:
        disk.close()
        raise
