"""How far a streaming query has come in the log of a store, as its checkpoint keeps it."""

from __future__ import annotations

from typing import Any, Final

from qmq_pipeline.errors import SourceError
from qmq_pipeline.places.options import LogOptions

_STORE: Final = "store_id"
_OFFSET: Final = "offset"
#: Of an archive that has nothing yet, nobody knows whose it will be.
NO_STORE: Final = ""


def position(store_id: str, offset: int) -> dict[str, Any]:
    """An offset in the log of this store."""
    # Spark compares offsets as text in places, so keys must always have the same order.
    return {_STORE: store_id, _OFFSET: offset}


def offset_of(found: dict[str, Any], store_id: str, options: LogOptions) -> int:
    """The offset of a position; raises `SourceError` for that of another store."""
    if found[_STORE] not in (store_id, NO_STORE):
        raise SourceError(
            source=options.place.name,
            reason=f"the checkpoint is of store {found[_STORE]}, and this is {store_id}",
            remedy="Use another checkpoint location for another broker",
        )
    return int(found[_OFFSET])
