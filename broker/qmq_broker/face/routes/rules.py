"""Which role each route of people and tools needs, and on which subject.

One table for all routes behind `admin.py`; a route that is not in it is for admins of all subjects.
The hot routes check for themselves (`hot.py`): their subjects are in frames.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from qmq_broker.face.callers.access import ALL_SUBJECTS, Role
from qmq_broker.face.callers.door import caller_of
from qmq_broker.face.routes.queries import check_once

Endpoint = Callable[[Request], Awaitable[Response]]


class About(Enum):
    """The subject that a route is about."""

    #: None: everybody who was let in may ask.
    NOTHING = "nothing"
    #: All of them, whatever the query says.
    ALL = "all"
    #: The one in the path or the query; all of them if it names none.
    NAMED = "named"
    #: The same; if it names none, the handler leaves out what the caller may not see.
    LISTED = "listed"
    #: The one in the body, or of the message that the body names: the handler checks.
    IN_BODY = "in body"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Who may use a route; admins may in any case."""

    roles: tuple[Role, ...] = ()
    about: About = About.NAMED


#: Anyone with a role on a subject may see that it exists and how far its groups are.
READERS: Final = (Role.PRODUCER, Role.CONSUMER)
#: The content of a message is for those who may consume it.
RULES: Final[Mapping[str, Rule]] = {
    "GET /healthz": Rule(about=About.NOTHING),
    "GET /readyz": Rule(about=About.NOTHING),
    "GET /openapi.json": Rule(about=About.NOTHING),
    "GET /metrics": Rule(roles=READERS, about=About.ALL),
    "GET /v1/caller": Rule(about=About.NOTHING),
    "GET /v1/subjects": Rule(roles=READERS, about=About.LISTED),
    "POST /v1/subjects/remove": Rule(about=About.IN_BODY),
    "GET /v1/room": Rule(roles=READERS, about=About.ALL),
    "GET /v1/groups": Rule(roles=READERS, about=About.LISTED),
    "GET /v1/dead": Rule(roles=(Role.CONSUMER,)),
    "GET /v1/messages": Rule(roles=(Role.CONSUMER,), about=About.LISTED),
    "GET /v1/messages/{message_id}/trace": Rule(roles=(Role.CONSUMER,), about=About.LISTED),
    "GET /v1/files": Rule(roles=(Role.CONSUMER,), about=About.ALL),
    "GET /v1/files/read": Rule(roles=(Role.CONSUMER,), about=About.ALL),
    "GET /v1/delayed": Rule(roles=READERS),
    "GET /v1/delayed/histogram": Rule(roles=READERS),
    "GET /v1/delayed/status": Rule(roles=READERS, about=About.ALL),
    "GET /v1/delayed/{message_id}": Rule(roles=(Role.CONSUMER,), about=About.LISTED),
    "POST /v1/delayed/retry": Rule(about=About.ALL),
    "POST /v1/delayed/accept-clock": Rule(about=About.ALL),
    "POST /v1/delayed/cancel": Rule(roles=(Role.PRODUCER,), about=About.IN_BODY),
    "POST /v1/delayed/reschedule": Rule(roles=(Role.PRODUCER,), about=About.IN_BODY),
    "GET /v1/keepers": Rule(roles=READERS, about=About.ALL),
    # Like a group of theirs that would hold the log; they may read all of it
    "POST /v1/keepers/keep": Rule(roles=(Role.CONSUMER,), about=About.ALL),
    "POST /v1/keepers/remove": Rule(about=About.ALL),
    "POST /v1/state": Rule(about=About.ALL),
    "POST /v1/groups/pause": Rule(about=About.IN_BODY),
    "POST /v1/groups/resume": Rule(about=About.IN_BODY),
    "POST /v1/groups/seek": Rule(about=About.IN_BODY),
    "POST /v1/groups/configure": Rule(about=About.IN_BODY),
    "POST /v1/groups/remove": Rule(about=About.IN_BODY),
    "POST /v1/dead/replay": Rule(about=About.IN_BODY),
    "POST /v1/dead/purge": Rule(about=About.IN_BODY),
}
#: Served beside these, directly on ASGI.
HOT_ROUTES: Final = ("POST /v1/send", "POST /v1/pull", "POST /v1/settle")
_ADMINS_OF_ALL: Final = Rule(about=About.ALL)


def route_name(route: Route) -> str:
    """Method and path, as in the table and in docs/http.md."""
    methods = (route.methods or {"GET"}) - {"HEAD"}
    return f"{min(methods)} {route.path}"


def guard(application: Starlette) -> None:
    """Put every route behind its rule, whichever list it comes from."""
    # A redirect would lead to whatever host the request named
    application.router.redirect_slashes = False
    routes = application.router.routes
    assert all(isinstance(route, Route) for route in routes), "what is no route has no rule"
    routes[:] = [_guarded(route) for route in routes if isinstance(route, Route)]


def sight(request: Request, *roles: Role) -> Callable[[str], bool]:
    """Whether the caller may see a subject in a list."""
    caller = caller_of(request.scope)
    return lambda subject: caller.may(roles or READERS, subject)


def _guarded(route: Route) -> Route:
    rule = RULES.get(route_name(route), _ADMINS_OF_ALL)
    endpoint: Endpoint = route.endpoint

    async def ask(request: Request) -> Response:
        check_once(request)
        _check(rule, request)
        return await endpoint(request)

    return Route(route.path, ask, methods=route.methods, name=route.name)


def _check(rule: Rule, request: Request) -> None:
    if rule.about is About.NOTHING:
        return
    caller = caller_of(request.scope)
    subject = request.path_params.get("subject") or request.query_params.get("subject")
    if rule.about is About.ALL or (subject is None and rule.about is About.NAMED):
        subject = ALL_SUBJECTS
    if subject is not None and not caller.may(rule.roles, subject):
        raise caller.refusal(rule.roles or (Role.ADMIN,), subject)
