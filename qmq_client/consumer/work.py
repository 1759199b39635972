"""Runs one handler call, from encoded records to outcomes, for one message or a batch.

Records are decoded first, so that malformed ones are left out; then the inbox's transaction begins,
if there is one; then the handler is called with its arguments inside its middleware. An outcome is
recorded only after the handler returned and the transaction committed. No exception of a handler
leaves this module.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Sequence,
)
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import msgspec

from qmq_client.clock import Clock
from qmq_client.consumer.async_calls import AsyncCalls
from qmq_client.consumer.counters import Counters
from qmq_client.consumer.delivery import (
    ACKED,
    Delivery,
    Outcome,
    Received,
    Settler,
    Verdict,
    nacked,
    nacked_untried,
    rejected,
    unreadable,
)
from qmq_client.consumer.error_texts import (
    HandlerFailures,
    caused_by,
    error_text,
    error_traceback,
    in_one_line,
    reason_text,
    with_causes,
)
from qmq_client.consumer.forked import keep_in_process
from qmq_client.consumer.handler import Handler, HandlerCall, plain_manager
from qmq_client.consumer.ledger import Ledger
from qmq_client.consumer.outage import InboxOutage, Prober
from qmq_client.consumer.parameters import Part
from qmq_client.consumer.prefetch import Running
from qmq_client.current import as_current
from qmq_client.errors import ConfigurationError, HandlerTimeoutError
from qmq_client.message import Message, fields_to_message
from qmq_client.request_headers import handling
from qmq_client.retry import Reject, Retry
from qmq_client.wire.errors import ProtocolError, QmqError
from qmq_client.wire.record import Record, decode_fields

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session

    from qmq_client.inbox import Inbox
    from qmq_client.inbox.async_inbox import AsyncInbox

#: Return values that mean that the handler has not run: objects to await or iterate.
_UNDONE: Final = (Awaitable, Generator, AsyncGenerator, Future)


class Decoded(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A decoded message."""

    received: Received
    record: Record
    body: Any
    #: Only if handler or middleware need it.
    message: Message | None


class Calls:
    """Calls one handler. Thread safe."""

    def __init__(self, handler: Handler, settler: Settler, async_calls: AsyncCalls) -> None:
        self.handler = handler
        self.async_calls = async_calls
        self._settler = settler
        self._function = keep_in_process(handler.function, is_async=handler.is_async)
        self._is_batch = handler.options.batch_size > 1
        self._positional, self._keywords = (
            handler.parameters.positional,
            handler.parameters.keywords,
        )
        self._of_one: dict[Part, Callable[[Decoded], object]] = {
            Part.BODY: attrgetter("body"),
            Part.MESSAGE: attrgetter("message"),
            Part.DELIVERY: self._delivery,
        }
        parts = handler.parameters.parts
        #: Whether messages must be decoded from records.
        self.takes_message = bool({Part.MESSAGE, Part.DELIVERY} & parts or handler.middleware)

    def run(self, decoded: list[Decoded], session: Session | None) -> None:
        """Call the handler, on this thread or on the loop; returns its result or raises its exception."""
        for one in decoded:
            one.received.is_begun = True
        with handling([dict(one.record.headers) for one in decoded]):
            if self.handler.is_async:
                self.async_calls.call(self._inside(decoded, session))
                return
            values, named = self._arguments(decoded, session)
            if not self.handler.middleware:
                self._check_ran(self._function(*values, **named))
                return
            around = self._handler_call(decoded, session)
            with ExitStack() as stack:
                for middleware in self.handler.middleware:
                    stack.enter_context(plain_manager(middleware, around))
                self._check_ran(self._function(*values, **named))

    async def run_on_loop(self, decoded: list[Decoded], session: AsyncSession) -> None:
        """Call an asynchronous handler from a task of its loop."""
        for one in decoded:
            one.received.is_begun = True
        with handling([dict(one.record.headers) for one in decoded]):
            await self._inside(decoded, session)

    async def _inside(self, decoded: list[Decoded], session: Session | AsyncSession | None) -> None:
        timeout_ms = self.handler.options.timeout_ms
        if not timeout_ms:
            await self._awaited(decoded, session)
            return
        try:
            async with asyncio.timeout(timeout_ms / 1000) as deadline:
                await self._awaited(decoded, session)
        except TimeoutError as error:
            if not deadline.expired():  # the handler's own error
                raise
            raise HandlerTimeoutError(timeout_ms=timeout_ms) from error

    async def _awaited(
        self, decoded: list[Decoded], session: Session | AsyncSession | None
    ) -> None:
        values, named = self._arguments(decoded, session)
        if not self.handler.middleware:
            self._check_ran(await self._function(*values, **named))
            return
        around = self._handler_call(decoded, session)
        async with AsyncExitStack() as stack:
            for middleware in self.handler.middleware:
                manager = middleware(around)
                if isinstance(manager, AbstractAsyncContextManager):
                    await stack.enter_async_context(manager)
                else:
                    stack.enter_context(manager)
            self._check_ran(await self._function(*values, **named))

    def _check_ran(self, returned: object) -> None:
        """Raise if the handler returned something to await or iterate: its message must not be acked."""
        if returned is None or not isinstance(returned, _UNDONE):
            return
        if isinstance(returned, Coroutine | Generator):
            returned.close()
        raise ConfigurationError(
            setting=f"handler of {self.handler.options.name}",
            value=f"returned a {type(returned).__name__}, which is not awaited",
            remedy="Make the decorated function itself `async def`, and await inside.",
        )

    def _handler_call(
        self, decoded: list[Decoded], session: Session | AsyncSession | None
    ) -> HandlerCall:
        options = self.handler.options
        return HandlerCall(
            subject=options.subject,
            group=options.group,
            deliveries=tuple(map(self._delivery, decoded)),
            session=session,
        )

    def _arguments(
        self, decoded: list[Decoded], session: Session | AsyncSession | None
    ) -> tuple[list[object], dict[str, object]]:
        values = [self._argument(part, decoded, session) for part in self._positional]
        if not self._keywords:
            return values, {}
        return values, {name: self._argument(p, decoded, session) for name, p in self._keywords}

    def _argument(
        self, part: Part, decoded: list[Decoded], session: Session | AsyncSession | None
    ) -> object:
        if part is Part.SESSION:
            return session
        of_one = self._of_one[part]
        return list(map(of_one, decoded)) if self._is_batch else of_one(decoded[0])

    def _delivery(self, decoded: Decoded) -> Delivery:
        assert decoded.message is not None  # a delivery is made for every handler that takes one
        return Delivery(decoded.received, decoded.message, self._settler)


_LOG: Final = logging.getLogger("qmq.consumer")
_COUNTED_AS: Final = {
    Verdict.ACK: "acked",
    Verdict.NACK: "nacked",
    Verdict.REJECT: "rejected",
}


class _InboxError(Exception):
    """An error of the inbox before or after the handler; `__cause__` is the reason."""

    def __init__(self, *, was_begun: bool) -> None:
        super().__init__()
        #: Whether the handler had returned.
        self.was_begun = was_begun


class Work:
    """Calls one handler. Thread safe; one call per worker at a time."""

    def __init__(
        self,
        calls: Calls,
        ledger: Ledger,
        *,
        inbox: Inbox | AsyncInbox | None,
        inbox_outage: InboxOutage,
        counters: Counters,
        clock: Clock,
        on_exit: Callable[[BaseException], None],
    ) -> None:
        self._handler = calls.handler
        self._ledger = ledger
        self._inbox = inbox
        self._inbox_outage = inbox_outage
        name = calls.handler.options.name
        self.prober = Prober(
            probe=self._probe,
            can_be_cancelled=inbox is not None and inbox.is_async,
            consumer=name,
            counters=counters,
        )
        self.failures = HandlerFailures(name, clock)
        self._calls = calls
        self._counters = counters
        self._clock = clock
        self._on_exit = on_exit
        self._async_calls = calls.async_calls
        self._outcomes_lock = threading.Lock()

    def run_slice(self, running: Running) -> None:
        """Call the handler with one batch after the other, and record the outcome of each message.

        Ends after the first failed call, so that other consumers may get the rest sooner.
        """
        acked = 0
        try:
            while (count := self._run(running.received, running.started_at_s)) is not None:
                acked += count
                if not running.begin_next(self._clock.monotonic_s()):
                    return
        finally:
            self._counters.add("acked", acked)

    def _run(self, batch: Sequence[Received], now_s: float) -> int | None:
        """Handle one batch; returns how many messages were acked, or None if one had another outcome."""
        decoded = self._decode(self._in_time(batch, now_s))
        if not decoded:
            return None
        received = [one.received for one in decoded]
        try:
            is_done = self._handle(decoded)
        except BaseException as error:  # the top of the worker's loop, which no error may end
            self.note(received, self._outcome_of(error, received))
            return None
        return self._ledger.add(received, ACKED) if is_done else None

    def log_unfinished(self, received: Sequence[Received], text: str) -> None:
        """Log that a stop came before a call with these messages had finished."""
        _LOG.warning(
            "handler_unfinished consumer=%s messages=%d message_id=%s attempt=%d error=%s",
            self._handler.options.name,
            len(received),
            received[0].message_id,
            received[0].attempt,
            in_one_line(text),
        )

    def note(self, received: Sequence[Received], outcome: Outcome) -> int:
        """Put an outcome into the ledger; returns how many messages had none before."""
        count = self._ledger.add(received, outcome)
        is_lost = self._handler.options.at_most_once and outcome.verdict is not Verdict.ACK
        self._counters.add("dropped" if is_lost else _COUNTED_AS[outcome.verdict], count)
        if is_lost and count:
            _LOG.warning(
                "messages_dropped consumer=%s messages=%d first_message_id=%s error=%s",
                self._handler.options.name,
                count,
                received[0].message_id,
                in_one_line(outcome.text),
            )
        return count

    def set_outcome(self, received: Received, outcome: Outcome) -> bool:
        """Keep an outcome until the batch is committed; returns whether it is the first, and in time."""
        with self._outcomes_lock:
            if not received.takes_outcome or received.outcome is not None:
                return False
            received.outcome = outcome
            return True

    @contextmanager
    def _taking_outcomes(self, decoded: list[Decoded]) -> Iterator[None]:
        """Accept outcomes of single messages from the handler during its transaction."""
        for one in decoded:
            one.received.takes_outcome = True
        try:
            yield
        finally:
            with self._outcomes_lock:
                for one in decoded:
                    one.received.takes_outcome = False

    def _note_outcomes(self, new: list[Decoded], decoded: list[Decoded]) -> None:
        """Record the set outcomes, also for a message that is in the batch twice because it was
        redelivered after a restart.
        """
        outcomes = {one.record.message_id: one.received.outcome for one in new}
        for one in decoded:
            outcome = outcomes.get(one.record.message_id)
            if outcome is not None:
                self.note([one.received], outcome)

    def _in_time(self, batch: Sequence[Received], now_s: float) -> Sequence[Received]:
        late = [one for one in batch if one.lease_ends_at_s <= now_s]
        if not late:
            return batch
        # Another consumer may have it by now; the broker counts this delivery as ended by its lease.
        for one in late:
            one.is_settled = True
        self._counters.add("late", len(late))
        return [one for one in batch if one.lease_ends_at_s > now_s]

    def _decode(self, batch: Sequence[Received]) -> list[Decoded]:
        decode = self._handler.parameters.decode
        decoded: list[Decoded] = []
        for received in batch:
            try:
                # The values once for both: they are most of what a quick handler's message costs.
                values = decode_fields(received.subject, received.record)
                record = Record(*values)
                body = None if decode is None else decode(record)
                message = fields_to_message(values) if self._calls.takes_message else None
                decoded.append(Decoded(received, record, body, message))
            except ProtocolError as error:
                self._counters.add("malformed")
                _LOG.warning(
                    "malformed_message consumer=%s message_id=%s sequence=%d attempt=%d error=%s",
                    self._handler.options.name,
                    received.message_id,
                    received.sequence,
                    received.attempt,
                    error_text(error),
                )
                self.note([received], unreadable(error))
            except BaseException as error:  # errors in the code of the body's type
                self.note([received], self._outcome_of(error, [received]))
        return decoded

    def _handle(self, decoded: list[Decoded]) -> bool:
        """Call the handler; returns whether that settles the messages that have no outcome yet."""
        if self._inbox is None:
            self._calls.run(decoded, None)
            return self._handler.options.auto_ack
        if self._inbox.is_async:
            count = self._async_calls.call(self._handle_on_loop(self._inbox, decoded))
        else:
            with ExitStack() as stack:
                opened = self._inbox.open([one.record.message_id for one in decoded])
                with _opening():
                    work = stack.enter_context(opened)
                new = _first_of_each(decoded, work.new)
                if new:
                    with as_current(work.session), self._taking_outcomes(new):
                        self._calls.run(new, work.session)
                    work.forgotten.update(_not_done(new))
                with _storing():
                    stack.close()
            self._note_outcomes(new, decoded)
            count = len(new)
        self._counters.add("duplicates", len(decoded) - count)
        return True

    async def _handle_on_loop(self, inbox: AsyncInbox, decoded: list[Decoded]) -> int:
        """Run the transaction and the handler as one task of the handlers' loop; returns how many messages were new."""
        async with AsyncExitStack() as stack:
            opened = inbox.open([one.record.message_id for one in decoded])
            with _opening():
                work = await stack.enter_async_context(opened)
            new = _first_of_each(decoded, work.new)
            if new:
                with as_current(work.session), self._taking_outcomes(new):
                    await self._calls.run_on_loop(new, work.session)
                work.forgotten.update(_not_done(new))
            with _storing():
                await stack.aclose()
        self._note_outcomes(new, decoded)
        return len(new)

    def _probe(self) -> None:
        """Raise unless the inbox would accept a message now. Requires: there is an inbox."""
        assert self._inbox is not None
        if self._inbox.is_async:
            self._async_calls.call(self._inbox.probe())
        else:
            self._inbox.probe()

    def _outcome_of(self, error: BaseException, received: list[Received]) -> Outcome:
        """The outcome of messages whose handler, or body type, raised this error."""
        if isinstance(error, Retry):
            return self._retry(error, received)
        if isinstance(error, Reject):
            return self._reject(error, len(received))
        if isinstance(error, _InboxError):
            return self._of_inbox(error, received)
        if isinstance(error, SystemExit | KeyboardInterrupt):
            self._on_exit(error)
        elif self._is_cut_short:
            return self._cut_short(error, received)
        return self._failed(error, received)

    def _retry(self, retry: Retry, received: list[Received]) -> Outcome:
        outcome = nacked(error_text(retry), retry.after_ms)
        if len(list(with_causes(retry))) > 1:  # an error that the handler translated
            self._log_failure(retry, outcome.text, received)
        return outcome

    def _reject(self, verdict: Reject, count: int) -> Outcome:
        reason = reason_text(verdict.reason)
        _, *causes = with_causes(verdict)
        if causes and causes[0] is not verdict.reason:
            reason = caused_by(reason or "rejected", error_text(causes[0]))
        if count == 1:
            return rejected(reason)
        # The faulty message is found when each is delivered alone.
        return nacked(f"Reject: {reason}", 0)

    @property
    def _is_cut_short(self) -> bool:
        return self._handler.is_async and self._async_calls.is_cancelled

    def _cut_short(self, error: BaseException, received: list[Received]) -> Outcome:
        """The outcome after a stop has cancelled the handler: the messages need not be faulty."""
        text = f"consumer stopped before the handler had finished: {error_text(error)}"
        if left := [
            one for one in received if not one.is_settled
        ]:  # otherwise the stop has logged it
            self.log_unfinished(left, text)
        return nacked_untried(text)

    def _of_inbox(self, error: _InboxError, received: list[Received]) -> Outcome:
        """The outcome after an error of the inbox. An outage of the database, of any length, makes no dead letters.

        Nor does an error that prevents a handler from starting. But a connection that is lost after
        a handler, while the database is reachable, may be lost because of the handler.
        """
        cause = error.__cause__ or error
        if self._is_cut_short:
            return self._cut_short(cause, received)
        if self._inbox_outage.is_cause(self.prober):
            # Without a delay: a consumer that can reach the database may get them.
            return nacked_untried(error_text(cause))
        outcome = self._failed(cause, received)
        return outcome if error.was_begun else nacked_untried(outcome.text, None)

    def _failed(self, error: BaseException, received: list[Received]) -> Outcome:
        text = error_text(error)
        self._log_failure(error, text, received)
        return nacked(text)

    def _log_failure(self, error: BaseException, text: str, received: list[Received]) -> None:
        first = received[0]
        level = logging.WARNING if self.failures.failed(error, text) else logging.DEBUG
        # The traceback is logged if it is new, and if the message will not be tried again.
        is_news = first.attempt in {1, self._handler.options.max_attempts}
        is_logged_in_full = _LOG.isEnabledFor(level if is_news else logging.DEBUG)
        _LOG.log(
            level,
            "handler_failed consumer=%s messages=%d message_id=%s attempt=%d error=%s%s",
            self._handler.options.name,
            len(received),
            first.message_id,
            first.attempt,
            in_one_line(text),
            error_traceback(error) if is_logged_in_full else "",
        )


@contextmanager
def _opening() -> Iterator[None]:
    """Distinguish errors of opening a transaction from errors of the handler."""
    try:
        yield
    except QmqError:
        raise
    except Exception as error:  # drivers raise various errors if the server is unreachable
        raise _InboxError(was_begun=False) from error


@contextmanager
def _storing() -> Iterator[None]:
    """Distinguish a lost connection after the handler from errors of the handler."""
    try:
        yield
    except Exception as error:
        if not getattr(error, "connection_invalidated", False):  # as SQLAlchemy reports it
            raise
        raise _InboxError(was_begun=True) from error


def _not_done(decoded: list[Decoded]) -> list[bytes]:
    """Ids of messages that the handler nacked or rejected: the inbox must not contain them afterwards."""
    outcomes = [(one.record.message_id, one.received.outcome) for one in decoded]
    return [id_ for id_, outcome in outcomes if outcome and outcome.verdict is not Verdict.ACK]


def _first_of_each(decoded: list[Decoded], new: set[bytes]) -> list[Decoded]:
    """The messages with new ids, each id once."""
    left = set(new)
    chosen: list[Decoded] = []
    for one in decoded:
        if one.record.message_id in left:
            left.remove(one.record.message_id)
            chosen.append(one)
    return chosen
