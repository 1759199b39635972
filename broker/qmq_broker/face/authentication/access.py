"""Authorization: roles, the subjects that they cover, and callers with their roles.

Three roles. A producer sends to its subjects; a consumer pulls, settles and reads there; an admin
may do both, and change the data of others: state, dead letters, positions of groups. Subjects are
one name, a prefix of names (`orders.*`), or all (`*`). There are no other patterns, so input of
untrusted clients is never evaluated as one.

No I/O: `token_file.py` reads tokens, `authenticator.py` authenticates callers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from qmq_broker.face.answers import refuse
from qmq_client.wire.names import is_name
from qmq_client.wire.shown import shorten

ALL_SUBJECTS: Final = "*"
#: The caller in the scope of a request; see `authenticator.py`.
CALLER: Final = "qmq.caller"


class Role(StrEnum):
    """The role of a caller."""

    PRODUCER = "producer"
    CONSUMER = "consumer"
    ADMIN = "admin"


class Right(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One role on some subjects."""

    role: Role
    #: A subject, a prefix of subjects followed by `*`, or `*` alone.
    subjects: str = ALL_SUBJECTS

    def __post_init__(self) -> None:
        start = self.subjects.removesuffix(ALL_SUBJECTS)
        if self.subjects != ALL_SUBJECTS and not is_name(start):
            raise ValueError(
                f"subjects {shorten(self.subjects)}: give a subject, the beginning of subjects "
                "followed by *, or * alone"
            )

    def covers(self, subject: str) -> bool:
        """Whether this right covers the subject."""
        if self.subjects.endswith(ALL_SUBJECTS):
            return subject.startswith(self.subjects[:-1])
        return subject == self.subjects

    def __str__(self) -> str:
        return f"{self.role}:{self.subjects}"


class Caller:
    """The sender of a request: a name for logs and refusals, and rights."""

    __slots__ = ("name", "owner", "rights")

    def __init__(self, name: str, rights: Iterable[Right], *, owner: str = "") -> None:
        """`owner`: the name of the token; subjects and groups that its callers create count against its share."""
        self.name = name
        self.rights = tuple(rights)
        is_operator = any(
            right.role is Role.ADMIN and right.subjects == ALL_SUBJECTS for right in self.rights
        )
        #: The token whose share of the broker's limits is used; empty for operators, who have no share.
        self.owner = "" if is_operator else owner

    def may(self, roles: Iterable[Role], subject: str) -> bool:
        """Whether the caller has one of these roles on the subject; an admin has every role.

        `*` as the subject asks for all of them.
        """
        wanted = {Role.ADMIN, *roles}
        return any(right.role in wanted and right.covers(subject) for right in self.rights)

    def check(self, roles: Sequence[Role], subject: str) -> None:
        """Raise `RequestRefusedError` (403) unless the caller may act in one of these roles, or as admin, there."""
        if not self.may(roles, subject):
            raise self._refusal(roles or (Role.ADMIN,), subject)

    def check_any(self, roles: Sequence[Role]) -> None:
        """Like `check`, for any one subject."""
        if not any(right.role in (Role.ADMIN, *roles) for right in self.rights):
            raise self._refusal(roles or (Role.ADMIN,), ALL_SUBJECTS)

    def _refusal(self, roles: Sequence[Role], subject: str) -> Exception:
        """The error 403 with the missing right, and the subject in `value`."""
        wanted = " or ".join(roles)
        role = roles[0] + ("" if subject == ALL_SUBJECTS else ":SUBJECTS")
        what = "all subjects" if subject == ALL_SUBJECTS else f"subject {shorten(subject)}"
        return refuse(
            403,
            "forbidden",
            f"{self.name} has no role {wanted} for {what}",
            field="subject",
            limit=", ".join(map(str, self.rights)) or "no right at all",
            value=subject,
            remedy=f"Create a token with it: qmq broker token add, --role {role}.",
        )


#: Every caller of a broker without tokens.
ANYBODY: Final = Caller(
    "anybody", (Right(role=Role.ADMIN), Right(role=Role.PRODUCER), Right(role=Role.CONSUMER))
)
#: A caller that was not identified and has no rights.
UNIDENTIFIED: Final = Caller("unidentified", ())


def parse_right(text: str) -> Right:
    """`ROLE` or `ROLE:SUBJECTS` as people write it; raises `ValueError` with the rule."""
    role, colon, subjects = text.partition(":")
    known = ", ".join(Role)
    if role not in list(Role) or (colon and not subjects):
        raise ValueError(
            f"{shorten(text)}: give one of {known}, or with subjects like producer:orders.*"
        )
    return Right(role=Role(role), subjects=subjects or ALL_SUBJECTS)
