"""One row of the table of routes: input, answer, and the roles that may use it.

Authorization of a request is decided here, by the row that serves it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import Any, Final, Generic, TypeVar

from starlette.requests import Request
from starlette.types import Scope

from qmq_broker.face.authentication.access import ALL_SUBJECTS, Role
from qmq_broker.face.authentication.authenticator import caller_of
from qmq_client.wire.requests import JSON_CONTENT_TYPE

#: Highest sequence, offset and time.
NUMBER_MAX: Final = 2**63 - 1
#: The row that serves a request, in its scope.
ROUTE: Final = "qmq.route"

H = TypeVar("H")


class About(Enum):
    """The subject that a route is about."""

    #: None: every caller may ask.
    NOTHING = "nothing"
    #: All of them, whatever the query says.
    ALL = "all"
    #: The one in the query; all of them if it names none.
    NAMED = "named"
    #: The same; if it names none, the handler leaves out what the caller may not see.
    LISTED = "listed"
    #: The one in the body, or of the message that the body names: the handler calls `check_subject`.
    IN_BODY = "in body"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a query."""

    name: str
    summary: str
    #: Its JSON schema; `number` refuses what is over the `maximum`.
    schema: Mapping[str, Any]
    example: str
    is_required: bool = False

    @property
    def is_number(self) -> bool:
        """Whether it is a number."""
        return "minimum" in self.schema


@dataclass(frozen=True, slots=True)
class Route(Generic[H]):
    """One row; `H` is what finds its handler."""

    method: str
    path: str
    handler: H
    _: KW_ONLY
    summary: str
    #: Who may use it besides admins.
    roles: tuple[Role, ...] = ()
    about: About = About.NAMED
    query: tuple[Parameter, ...] = ()
    body: type | None = None
    #: A body that is taken, as long as what it names exists.
    example: Mapping[str, Any] = field(default_factory=dict)
    #: The type of the answer, or the types of its fields.
    answer: type | Mapping[str, Any]
    #: Statuses of refusals, besides those of every route.
    statuses: tuple[int, ...] = ()
    #: Served without a token.
    is_open: bool = False
    #: Takes and gives frames as well as JSON.
    has_frames: bool = False
    #: Content type of the answer, if that is no JSON.
    media_type: str = JSON_CONTENT_TYPE

    @property
    def name(self) -> str:
        """Method and path, as in docs/http.md."""
        return f"{self.method} {self.path}"


def route_of(scope: Scope) -> Route[Any]:
    """The row that serves this request."""
    route: Route[Any] = scope[ROUTE]
    return route


def authorize(request: Request) -> None:
    """Raise `RequestRefusedError` (403) unless the caller may ask about the subject of the query."""
    route = route_of(request.scope)
    if route.about is About.NOTHING:
        return
    subject = request.query_params.get("subject")
    if route.about is About.ALL or (subject is None and route.about is About.NAMED):
        subject = ALL_SUBJECTS
    if subject is not None:
        check_subject(request.scope, subject)


def check_subject(scope: Scope, subject: str) -> None:
    """Raise `RequestRefusedError` (403) unless the caller has one of the route's roles on the subject."""
    caller_of(scope).check(route_of(scope).roles, subject)


def sight(scope: Scope) -> Callable[[str], bool]:
    """Whether the caller may see a subject in what the route lists."""
    caller, roles = caller_of(scope), route_of(scope).roles
    return lambda subject: caller.may(roles, subject)
