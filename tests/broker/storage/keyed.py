"""Messages with keys in a store on a recording disk, and what a search of them must find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from qmq_broker.options import StoreOptions
from qmq_broker.storage.files import layout
from qmq_broker.storage.index.key_search import FoundRecord, SearchResult, TimeRange
from qmq_broker.storage.store import Store
from qmq_client.wire.frame import build_message_frame, parse_message_frame
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import Record, encode_record
from tests.broker.storage.damaged import flip
from tests.crash.recording_disk import RecordingDisk
from tests.crash.world import OPTIONS
from tests.kit.clock import FakeClock

#: Two slots and eight entries a file, so that files fill and chains are long.
INDEXED = replace(OPTIONS, index_entries=8, dedupe_ids=6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One message that was stored, and where."""

    message_id: bytes
    key: str | None
    place: FoundRecord


class Keyed:
    """One life of a store whose messages have keys."""

    def __init__(
        self,
        disk: RecordingDisk | None = None,
        *,
        options: StoreOptions = INDEXED,
        kept: list[Kept] | None = None,
        instance: int = 7,
    ) -> None:
        self.disk = RecordingDisk() if disk is None else disk
        self.options = options
        self.clock = FakeClock()
        self.ids = MessageIds(instance)
        self.kept: list[Kept] = [] if kept is None else kept
        self.store = Store.open(self.disk, self.clock, options)

    def send(
        self, *keys: str | None, subject: str = "orders", ids: Sequence[bytes] = (), room: int = 10
    ) -> list[Kept]:
        """One frame, one message for each key; the clock goes on by a second."""
        made = list(ids) or [self.ids.next_id() for _ in keys]
        records = [
            encode_record(
                Record(message_id=id_, subject=subject, key=key, body=b"b" * room, born_at_ms=1)
            )
            for id_, key in zip(made, keys, strict=True)
        ]
        frame = parse_message_frame(build_message_frame({subject: records}))
        (placed,) = self.store.append([frame])
        self.store.commit_and_step()
        sent = [
            Kept(
                message_id=made[index],
                key=keys[index],
                place=FoundRecord(
                    subject,
                    placed.places[0].first_sequence + index,
                    placed.physical_offset + frame.positions[index],
                    placed.stored_at_ms,
                    record,
                ),
            )
            for index, record in enumerate(records)
        ]
        self.kept += sent
        self.clock.pass_ms(1_000)
        return sent

    def catch_up(self, bytes_max: int = 200) -> None:
        """Step the index until there is nothing left to do."""
        catch_up(self.store, bytes_max)

    def hurt(self, offset: int) -> None:
        """Alter a byte of the commit log."""
        base = offset - offset % self.options.segment_bytes
        number = self.disk.image.names[layout.segment_path(layout.COMMIT_LOG, base)]
        assert number is not None
        self.disk.image.change(number, flip(offset - base)(self.disk.image.inodes[number].seen))

    def again(self) -> Keyed:
        """The next life, after a kill with the power on."""
        self.disk.unlock()
        kept = self.kept
        return Keyed(self.disk, options=self.options, kept=kept, instance=100 + len(kept))


def catch_up(store: Store, bytes_max: int = 200) -> None:
    """Step the index until there is nothing left to do."""
    for _ in range(10_000):
        if not store.index.step(bytes_max).is_unfinished:
            return
    raise AssertionError("the key index does not come to an end")


def check_answers(store: Store, kept: Sequence[Kept], *, is_complete: bool | None = True) -> None:
    """Every id and every key is found at its places, newest first, and nothing else."""
    kept = [one for one in kept if one.place.physical_offset >= store.first_offset]
    for message_id in {one.message_id for one in kept}:
        result = store.search.by_id(message_id, 100)
        _check(result, [one for one in kept if one.message_id == message_id], is_complete)
    for subject, key in {(one.place.subject, one.key) for one in kept}:
        if key is not None:
            places = [one for one in kept if (one.place.subject, one.key) == (subject, key)]
            _check(store.search.by_key(subject, key, TimeRange(), 100), places, is_complete)


def _check(result: SearchResult, expected: Sequence[Kept], is_complete: bool | None) -> None:
    assert result.found == [one.place for one in reversed(expected)]
    assert not result.has_more
    if is_complete is not None:
        assert result.is_complete is is_complete
