"""A route: one row of the table of routes, with its input, its answer, and the roles that may use it.

`authorize` and `check_subject` decide by the route whether a caller may make a request.
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

#: The highest sequence, offset or time.
NUMBER_MAX: Final = 2**63 - 1
#: Key in the scope of a request: the route that serves it.
ROUTE: Final = "qmq.route"

H = TypeVar("H")


class About(Enum):
    """The subjects to which a request needs rights."""

    #: None: every caller may make the request.
    NOTHING = "nothing"
    #: All subjects, independent of the query.
    ALL = "all"
    #: The subject in the query; all subjects if it names none.
    NAMED = "named"
    #: The subject in the query; if it names none, the handler leaves out subjects that the caller may not see.
    LISTED = "listed"
    #: The subject in the body, or of the message that the body names: the handler calls `check_subject`.
    IN_BODY = "in body"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a query."""

    name: str
    summary: str
    #: Its JSON schema; the function `number` refuses values above the `maximum`.
    schema: Mapping[str, Any]
    example: str
    is_required: bool = False

    @property
    def is_number(self) -> bool:
        """Whether it is a number."""
        return "minimum" in self.schema


@dataclass(frozen=True, slots=True)
class Route(Generic[H]):
    """One route; `H` is the type by which its handler is found."""

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
    #: A valid body, if the things that it names exist.
    example: Mapping[str, Any] = field(default_factory=dict)
    #: The type of the answer, or the types of its fields.
    answer: type | Mapping[str, Any]
    #: Statuses of its refusals, in addition to those of every route.
    statuses: tuple[int, ...] = ()
    #: Served without a token.
    is_open: bool = False
    #: Accepts and returns frames as well as JSON.
    has_frames: bool = False
    #: Content type of the answer.
    media_type: str = JSON_CONTENT_TYPE

    @property
    def name(self) -> str:
        """Method and path, as in docs/http.md."""
        return f"{self.method} {self.path}"


def route_of(scope: Scope) -> Route[Any]:
    """The route that serves this request."""
    route: Route[Any] = scope[ROUTE]
    return route


def authorize(request: Request) -> None:
    """Raise `RequestRefusedError` (403) unless the caller has a role on the subjects of the request."""
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
    """A function that says whether the caller may see a subject in a listing."""
    caller, roles = caller_of(scope), route_of(scope).roles
    return lambda subject: caller.may(roles, subject)
