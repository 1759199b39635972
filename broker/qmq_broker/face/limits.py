"""Limits of the HTTP layer, each with its name, unit and reason. Printed at start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FaceLimits:
    """The resources that untrusted clients may use."""

    #: Open connections; each costs a descriptor and some kilobytes.
    connections: int = 2_000
    #: Connections from one address: a single machine must not shut out all others.
    connections_per_address: int = 1_600
    #: Requests under way, without waiting pulls: those have a bound of their own.
    requests: int = 1_000
    #: Bytes of all bodies of sends, pulls and settlements, counted as they arrive.
    bodies_bytes: int = 256 * 1024 * 1024
    #: Bytes of all answers that clients have not read yet.
    answers_bytes: int = 256 * 1024 * 1024
    #: If there is no room for an answer, clients are dropped that have taken longer than this to
    #: read theirs: otherwise one client with some thirty connections could hold all of the room.
    unread_wanted_ms: int = 5_000
    #: Length of a request in JSON: parsing it blocks all other requests; use frames for more.
    json_bytes: int = 2 * 1024 * 1024
    #: Request line and headers of one request.
    head_bytes: int = 16 * 1024
    #: Headers of one request; ordinary clients send about ten.
    headers: int = 100
    #: Requests of one connection that wait for the answer to an earlier one; one read may contain a thousand.
    pipelined: int = 100
    #: From the first byte (or the connection) to the end of the headers: as two passes of the check
    #: are needed, a half-open connection lasts five seconds.
    head_ms: int = 4_500
    #: From the first byte to the end of the body: 8 MiB at 280 kB/s.
    request_ms: int = 30_000
    #: A connection without a request is closed after this long.
    idle_ms: int = 75_000
    #: A client that does not read its answer is dropped after this long.
    unread_ms: int = 30_000
    #: How often connections are checked for the four times above.
    sweep_ms: int = 250

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"limit {name}: {getattr(self, name)}; allowed: 1 or more")
