"""Packing of a record's fields of fixed length, and of its checksum.

This is the Python version. In compiled modules, the functions of the same names in `packing.pxd` replace
these, and call them for unusual values. Call them as `packing.seal`: the compiler finds its own version by
the name of the module. `record.py` explains the shapes.
"""

from __future__ import annotations

import struct
from typing import Final

from qmq_client.wire.checksum import crc32c

#: The fixed fields of a record after its checksum.
HEAD: Final = struct.Struct(">16sBBHHHQ")
PAIR: Final = struct.Struct(">BH")
_CRC: Final = struct.Struct(">I")

#: Message id, flags, the lengths of key, tags and headers, the number of headers, born at.
pack_head: Final = HEAD.pack
#: The same without the message id. Requires: as many bytes.
unpack_head: Final = struct.Struct(">20xBBHHHQ").unpack_from
#: The lengths of a header's name and value.
pack_pair: Final = PAIR.pack
#: The same, of bytes from a position. Requires: as many bytes.
unpack_pair: Final = PAIR.unpack_from


def seal(seed: int, head: bytes, body: bytes) -> bytes:
    """Head and body after their checksum, which continues the checksum `seed`."""
    # The body is copied only once, because it may have megabytes.
    return b"".join((_CRC.pack(crc32c(body, crc32c(head, seed))), head, body))


def is_sealed(seed: int, data: bytes) -> bool:
    """Whether data is what `seal` made with this seed. Requires: four bytes or more."""
    return bool(crc32c(data[_CRC.size :], seed) == _CRC.unpack_from(data)[0])
