"""The bytes of one entry: a safetensors file with one tensor (``docs/entry-format.md``).

Everything that reads here treats its input as hostile: lengths are checked before they are used,
and nothing is allocated on the word of a header.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from lmcache_ec.errors import CorruptEntryError, InvalidKeyError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_ec.key import CacheEngineKey

FORMAT_VERSION = "1"
TENSOR_NAME = "ec_cache"
ALIGNMENT = 4096
"""The payload starts on a multiple of this, so that direct I/O and memory maps can use it."""
MAX_HEADER_BYTES = 64 * 1024
"""Bound of everything before the payload; the longest ``mm_hash`` takes 24 KiB of it escaped."""
MAX_NDIM = 4

_LENGTH = struct.Struct("<Q")
# Room for the fixed text (about 200 bytes) and the fields that a key does not give: version,
# checksum, time, writer, four dimensions and one offset of up to 20 digits each.
_SLACK_BYTES = 512
_METADATA_FIELDS = {"format_version", "mm_hash", "namespace", "checksum", "created", "writer"}
_TENSOR_FIELDS = {"dtype", "shape", "data_offsets"}


class DType(NamedTuple):
    """How safetensors names a dtype, and the bytes that one element takes."""

    code: str
    itemsize: int


DTYPES = {
    "bfloat16": DType("BF16", 2),
    "float16": DType("F16", 2),
    "float32": DType("F32", 4),
    "float64": DType("F64", 8),
    "float8_e4m3fn": DType("F8_E4M3", 1),
    "float8_e5m2": DType("F8_E5M2", 1),
}
"""Every dtype that an entry can hold, by ``str(torch.dtype)`` without "torch."."""


@dataclass(frozen=True)
class EntryInfo:
    """What the header of one entry says, checked against the key and the entry's length.

    Attributes:
        shape: Dimensions, one to ``MAX_NDIM`` of them, none zero.
        dtype: A name of ``DTYPES``.
        payload_offset: Where the tensor's bytes start.
        payload_bytes: How many they are; they end where the entry ends.
        checksum: xxh3-64 of the payload, 16 hex digits, as the header claims it.
    """

    shape: tuple[int, ...]
    dtype: str
    payload_offset: int
    payload_bytes: int
    checksum: str


def checksum(payload: memoryview) -> str:
    """xxh3-64 of the payload, 16 hex digits. Copies nothing and lets other threads run."""
    return xxhash.xxh3_64_hexdigest(payload)


def payload_offset(key: CacheEngineKey) -> int:
    """Bytes before the payload of this key's entries, a multiple of ``ALIGNMENT``.

    Depends on the key alone, so room can be reserved before shape and checksum are known.

    Raises:
        InvalidKeyError: The namespace is so long that the header would pass ``MAX_HEADER_BYTES``.
    """
    texts = len(json.dumps(key.mm_hash)) + len(json.dumps(key.namespace.canonical))
    offset = -(-(_LENGTH.size + texts + _SLACK_BYTES) // ALIGNMENT) * ALIGNMENT
    if offset > MAX_HEADER_BYTES:
        raise InvalidKeyError(
            f"the header of {key.name} would take {offset} bytes, more than {MAX_HEADER_BYTES}: "
            f"its namespace has {len(key.namespace.canonical)} bytes; shorten the namespace's texts"
        )
    return offset


def build_header(
    key: CacheEngineKey, shape: Sequence[int], dtype_name: str, checksum: str, created: int
) -> bytes:
    """Everything before the payload, exactly ``payload_offset(key)`` bytes.

    Args:
        key: Names the entry.
        shape: Dimensions of the tensor, one to ``MAX_NDIM`` of them, none zero.
        dtype_name: Its dtype, the key's own, as in ``DTYPES``.
        checksum: What :func:`checksum` says of the payload.
        created: Seconds since 1970, UTC.

    Raises:
        InvalidKeyError: The shape or dtype cannot be stored under this key.
    """
    if dtype_name not in DTYPES or dtype_name != key.dtype:
        raise InvalidKeyError(
            f"a {dtype_name} tensor cannot be stored as {key.name}, whose namespace says "
            f"{key.dtype}; entries hold {', '.join(DTYPES)}"
        )
    if not 1 <= len(shape) <= MAX_NDIM or min(shape) < 1:
        raise InvalidKeyError(
            f"shape {tuple(shape)} of {key.name} cannot be stored; give one to {MAX_NDIM} "
            f"dimensions, none of them zero"
        )
    code, itemsize = DTYPES[dtype_name]
    text = json.dumps(
        {
            "__metadata__": {
                "format_version": FORMAT_VERSION,
                "mm_hash": key.mm_hash,
                "namespace": key.namespace.canonical,
                "checksum": checksum,
                "created": str(created),
                "writer": _writer(),
            },
            TENSOR_NAME: {
                "dtype": code,
                "shape": list(shape),
                "data_offsets": [0, math.prod(shape) * itemsize],
            },
        },
        separators=(",", ":"),
    ).encode("ascii")
    room = payload_offset(key) - _LENGTH.size
    assert len(text) <= room, (len(text), room)
    return _LENGTH.pack(room) + text.ljust(room)


def parse(view: memoryview, key: CacheEngineKey) -> EntryInfo:
    """Check everything about an entry but its payload; see :func:`verify` for that.

    Args:
        view: The whole entry and nothing else, as bytes. Trusted in nothing.
        key: The key that it was read for; compared in full.

    Raises:
        CorruptEntryError: The bytes are not a whole entry of this key.
    """
    offset = _header_length(view, key)
    header = _object(_decode(view[_LENGTH.size : offset], key), {"__metadata__", TENSOR_NAME}, key)
    metadata = _object(header["__metadata__"], _METADATA_FIELDS, key)
    tensor = _object(header[TENSOR_NAME], _TENSOR_FIELDS, key)
    for field, value in metadata.items():
        if not isinstance(value, str):
            raise _corrupt(key, f"metadata {field} is not a text")
    if metadata["format_version"] != FORMAT_VERSION:
        raise _corrupt(key, f"format version {metadata['format_version'][:20]!r} is not known")
    if metadata["mm_hash"] != key.mm_hash:
        raise _corrupt(key, "it belongs to another mm_hash")
    if metadata["namespace"] != key.namespace.canonical:
        raise _corrupt(key, "it belongs to another namespace")
    dtype = DTYPES.get(key.dtype)
    if dtype is None or tensor["dtype"] != dtype.code:
        raise _corrupt(key, f"its dtype is not {key.dtype}")
    shape = _integers(tensor["shape"], key)
    if not 1 <= len(shape) <= MAX_NDIM or min(shape) < 1:
        raise _corrupt(key, "its shape has too few or too many dimensions, or one below 1")
    payload_bytes = len(view) - offset
    if math.prod(shape) * dtype.itemsize != payload_bytes:
        raise _corrupt(key, f"its shape does not fit a payload of {payload_bytes} bytes")
    if _integers(tensor["data_offsets"], key) != (0, payload_bytes):
        raise _corrupt(key, f"its offsets do not span a payload of {payload_bytes} bytes")
    return EntryInfo(shape, key.dtype, offset, payload_bytes, metadata["checksum"])


def verify(view: memoryview, info: EntryInfo) -> None:
    """Check the payload of a parsed entry against its checksum.

    Raises:
        CorruptEntryError: They differ.
    """
    found = checksum(view[info.payload_offset :])
    if found != info.checksum:
        raise CorruptEntryError(
            f"the payload's checksum is {found}, its header says {info.checksum[:16]!r}; "
            "delete the entry"
        )


@functools.cache
def _writer() -> str:
    return f"lmcache-ec {importlib.metadata.version('lmcache-ec')}"[:64]


def _header_length(view: memoryview, key: CacheEngineKey) -> int:
    """Where the payload starts, by the entry's first bytes."""
    if len(view) < _LENGTH.size:
        raise _corrupt(key, f"it has only {len(view)} bytes")
    (length,) = _LENGTH.unpack_from(view)
    offset: int = _LENGTH.size + length
    if offset > MAX_HEADER_BYTES or offset % ALIGNMENT:
        raise _corrupt(key, f"a header of {length} bytes is too long or not aligned")
    if offset >= len(view):
        raise _corrupt(key, f"it ends at byte {len(view)}, before its payload at {offset}")
    return offset


def _decode(header: memoryview, key: CacheEngineKey) -> object:
    if header[0] != ord("{"):
        raise _corrupt(key, "its header is not a JSON object")
    try:
        value: object = json.loads(str(header, "utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, huge numbers, nesting
        raise _corrupt(key, f"its header cannot be read ({type(error).__name__})") from error
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Build one JSON object; of two equal keys, readers could disagree on which one counts."""
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key occurs twice")
    return value


def _object(value: object, fields: set[str], key: CacheEngineKey) -> dict[str, Any]:
    if not isinstance(value, dict) or value.keys() != fields:
        raise _corrupt(key, f"its header does not have exactly {', '.join(sorted(fields))}")
    return value


def _integers(value: object, key: CacheEngineKey) -> tuple[int, ...]:
    # type() and not isinstance(): JSON's true would pass as 1.
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        raise _corrupt(key, "its shape or offsets are not lists of integers")
    return tuple(value)


def _corrupt(key: CacheEngineKey, reason: str) -> CorruptEntryError:
    return CorruptEntryError(f"these bytes are not entry {key.name}: {reason}; delete the entry")
