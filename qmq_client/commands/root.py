"""The click group behind `qmq`: loads the one sub-command that was named.

A `QmqError`, and a full disk under standard output, become one line and an exit code here,
never a traceback. Any other exception is a bug of QMQ and keeps its traceback.
"""

from __future__ import annotations

import difflib
import errno
from typing import Any, Final

import click

from qmq_client.commands.exit_codes import UNREACHABLE, exit_code_of
from qmq_client.commands.listing import COMMANDS_GROUP, discard_output, found_commands, help_text
from qmq_client.errors import QmqError

_DISK_REFUSES: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


class RootGroup(click.Group):
    """Sub-commands from entry points, imported only when they are run.

    Several packages may add to a sub-command that is a group, by entry points of the group `qmq.commands.NAME`.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(found_commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        point = found_commands().get(cmd_name)
        if point is None:
            return None
        command = point.load()
        if not isinstance(command, click.Command):
            raise click.ClickException(f"{point.value} is not a click command")
        if isinstance(command, click.Group):
            for name, brought in found_commands(f"{COMMANDS_GROUP}.{cmd_name}").items():
                command.add_command(brought.load(), name)
        _show_whole_sentences(command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, names = args[0], self.list_commands(ctx)
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            ctx.fail(f"No command {name!r}." + (f" Did you mean {near[0]!r}?" if near else ""))
        return super().resolve_command(ctx, args)

    def get_help(self, ctx: click.Context) -> str:
        return help_text(found_commands())

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for argument in args:
            try:
                argument.encode()
            except UnicodeEncodeError:  # otherwise each command would fail at a different place
                ctx.fail(
                    f"{argument!r} is not UTF-8. Bodies may be any bytes from standard input; "
                    "in a terminal with another encoding, set LC_ALL=C.UTF-8."
                )
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except QmqError as error:
            click.echo(f"Error: {' '.join(str(error).split())}", err=True)
            ctx.exit(exit_code_of(error))
        except OSError as error:
            if error.errno not in _DISK_REFUSES:
                raise
            discard_output()
            click.echo(f"Error: {error}", err=True)
            ctx.exit(UNREACHABLE)


def _show_whole_sentences(command: click.Command) -> None:
    """List sub-commands with their complete first sentence, which click would truncate."""
    for below in command.commands.values() if isinstance(command, click.Group) else ():
        below.short_help = below.short_help or " ".join((below.help or "").split("\n\n")[0].split())
        _show_whole_sentences(below)


@click.group(cls=RootGroup, context_settings={"help_option_names": ["-h", "--help"]})
def root() -> None:
    """Transactional messages: sent if and only if the database transaction commits."""
