"""The entry format: golden bytes, an independent reader, hostile bytes and a fuzzer."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from lmcache_ec import entry
from lmcache_ec.errors import CorruptEntryError, InvalidKeyError
from lmcache_ec.key import MAX_MM_HASH_BYTES, CacheEngineKey, ECMetadata, Namespace

if TYPE_CHECKING:
    from collections.abc import Callable

GOLDEN = Path(__file__).parent / "golden" / "entry-v1.safetensors"
GOLDEN_KEY = CacheEngineKey(
    Namespace(
        ECMetadata("org/model", "main", "w0", "", "Qwen2VL"), "bfloat16", namespace="tenant-a"
    ),
    "0123456789abcdef" * 4,
)
# One to six in bfloat16: the upper halves of their float32 patterns.
GOLDEN_PAYLOAD = struct.pack("<6H", 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0)

SHAPE = (7, 13)
PAYLOAD = bytes(range(7 * 13 * 2))
KEY = CacheEngineKey(Namespace(ECMetadata("m"), "bfloat16"), "a" * 64)


def make(key: CacheEngineKey, shape: tuple[int, ...], payload: bytes) -> bytes:
    checksum = entry.checksum(memoryview(payload))
    return entry.build_header(key, shape, key.dtype, checksum, 1_700_000_000) + payload


def read(data: bytes, key: CacheEngineKey) -> entry.EntryInfo:
    view = memoryview(data)
    info = entry.parse(view, key)
    entry.verify(view, info)
    return info


GOOD = make(KEY, SHAPE, PAYLOAD)


def header_of(data: bytes) -> dict[str, Any]:
    (length,) = struct.unpack_from("<Q", data)
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    return header


def with_text(text: bytes, payload: bytes = PAYLOAD) -> bytes:
    """An entry with any header text, padded and sized as the format asks."""
    room = -(-(8 + len(text)) // 4096) * 4096 - 8
    return struct.pack("<Q", room) + text.ljust(room) + payload


def test_golden_bytes_are_read() -> None:
    data = GOLDEN.read_bytes()
    assert read(data, GOLDEN_KEY) == entry.EntryInfo(
        (2, 3), "bfloat16", 4096, 12, xxhash.xxh3_64(GOLDEN_PAYLOAD).hexdigest()
    )
    assert data[4096:] == GOLDEN_PAYLOAD
    with safe_open(GOLDEN, "pt") as file:
        expected = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.bfloat16)
        assert torch.equal(file.get_tensor("ec_cache"), expected)


def test_golden_bytes_are_written() -> None:
    golden = GOLDEN.read_bytes()
    written = make(GOLDEN_KEY, (2, 3), GOLDEN_PAYLOAD)
    headers = header_of(golden), header_of(written)
    for header in headers:
        assert header["__metadata__"].pop("writer").startswith("lmcache-ec ")
    assert headers[0] == headers[1]
    assert len(written) == len(golden)


@pytest.mark.parametrize("name", entry.DTYPES)
@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4), (1, 2, 3, 1)])
def test_safetensors_reads_every_dtype(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    dtype = getattr(torch, name)
    count = math.prod(shape) * dtype.itemsize
    payload = bytes(i * 37 % 256 for i in range(count))
    key = CacheEngineKey(Namespace(ECMetadata("m"), name), "h")
    data = make(key, shape, payload)
    assert read(data, key).shape == shape
    path = tmp_path / "entry.safetensors"
    path.write_bytes(data)
    with safe_open(path, "pt") as file:
        assert list(file.keys()) == ["ec_cache"]
        assert file.metadata()["mm_hash"] == "h"
        tensor = file.get_tensor("ec_cache")
    assert tensor.dtype == dtype
    assert tensor.shape == shape
    assert bytes(tensor.flatten().view(torch.uint8).tolist()) == payload


@pytest.mark.parametrize(
    "mm_hash",
    ["", "../..", "\x00" * MAX_MM_HASH_BYTES, "é" * 2048, "🖼" * 1024, '"\\' * 2048, "line\n"],
    ids=["empty", "path", "NUL", "accents", "emoji", "quotes", "newline"],
)
def test_header_is_aligned_and_bounded(mm_hash: str) -> None:
    long = ECMetadata("m" * 1000, output_format=json.dumps({"\x00": '"' * 2000}))
    for metadata in (ECMetadata("m"), long):
        key = CacheEngineKey(Namespace(metadata, "float8_e5m2"), mm_hash)
        offset = entry.payload_offset(key)
        assert offset % entry.ALIGNMENT == 0
        assert offset <= entry.MAX_HEADER_BYTES
        assert read(make(key, (3,), b"abc"), key).payload_offset == offset
        widest = (2**63 - 1,) * entry.MAX_NDIM
        header = entry.build_header(key, widest, "float8_e5m2", "f" * 16, 2**63)
        assert len(header) == offset


def test_room_for_the_header_depends_on_the_key_alone() -> None:
    headers = [
        entry.build_header(KEY, shape, "bfloat16", "0" * 16, created)
        for shape in [(1,), (10**9, 10**9, 10**9, 10**9)]
        for created in [0, 10**12]
    ]
    assert {len(header) for header in headers} == {entry.payload_offset(KEY)}


def test_endless_namespace_is_refused() -> None:
    key = CacheEngineKey(Namespace(ECMetadata("m" * 70_000), "bfloat16"), "h")
    with pytest.raises(InvalidKeyError, match="shorten"):
        entry.payload_offset(key)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (-1, 2), (1, 1, 1, 1, 1)])
def test_shape_that_cannot_be_stored(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidKeyError, match="shape"):
        entry.build_header(KEY, shape, "bfloat16", "0" * 16, 0)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_dtype_that_cannot_be_stored(dtype: str) -> None:
    with pytest.raises(InvalidKeyError, match=dtype):
        entry.build_header(KEY, (1,), dtype, "0" * 16, 0)


def test_another_key_is_refused() -> None:
    other_hash = CacheEngineKey(KEY.namespace, "a" * 63 + "b")
    other_space = CacheEngineKey(Namespace(ECMetadata("m"), "bfloat16", epoch="2"), KEY.mm_hash)
    other_dtype = CacheEngineKey(Namespace(ECMetadata("m"), "float16"), KEY.mm_hash)
    assert read(GOOD, KEY).shape == SHAPE
    for key in (other_hash, other_space, other_dtype):
        with pytest.raises(CorruptEntryError, match=key.name):
            entry.parse(memoryview(GOOD), key)


def test_dtype_must_be_the_keys() -> None:
    # Same width and same namespace, so only the tensor's own dtype tells.
    with pytest.raises(CorruptEntryError, match="dtype"):
        read(edited(lambda header: header["ec_cache"].update(dtype="F16")), KEY)


def test_payload_is_verified() -> None:
    data = GOOD[:-1] + bytes([GOOD[-1] ^ 1])
    info = entry.parse(memoryview(data), KEY)
    with pytest.raises(CorruptEntryError, match="checksum"):
        entry.verify(memoryview(data), info)


def edited(edit: Callable[[dict[str, Any]], object], payload: bytes = PAYLOAD) -> bytes:
    header = header_of(GOOD)
    edit(header)
    return with_text(json.dumps(header).encode(), payload)


def tensor(**fields: object) -> bytes:
    return edited(lambda header: header["ec_cache"].update(fields))


def metadata(**fields: object) -> bytes:
    return edited(lambda header: header["__metadata__"].update(fields))


TEXT = json.dumps(header_of(GOOD)).encode()
HUGE = b'{"__metadata__":{},"ec_cache":{"dtype":"BF16","shape":[' + b"9" * 5000 + b"]}}"
HOSTILE = {
    "nothing": b"",
    "seven bytes": GOOD[:7],
    "length only": GOOD[:8],
    "header only": GOOD[: entry.payload_offset(KEY)],
    "one byte short": GOOD[:-1],
    "one byte long": GOOD + b"\0",
    "twice": GOOD + GOOD,
    "zero length": struct.pack("<Q", 0) + GOOD[8:],
    "huge length": struct.pack("<Q", 2**64 - 1) + GOOD[8:],
    "length beyond the bound": with_text(TEXT.ljust(70_000)),
    "header not aligned": struct.pack("<Q", len(TEXT)) + TEXT + PAYLOAD,
    "leading space": with_text(b" " + TEXT),
    "byte order mark": with_text(b"\xef\xbb\xbf" + TEXT),
    "UTF-16": with_text(TEXT.decode().encode("utf-16-le")),
    "bad UTF-8": with_text(TEXT.replace(b"aaa", b"\xff\xff\xff", 1)),
    "not JSON": with_text(b"{" + TEXT),
    "text after JSON": with_text(TEXT + b"x"),
    "NUL padding": with_text(TEXT + b"\0" * 100),
    "list": with_text(b"[" + TEXT + b"]"),
    "deep nesting": with_text(b'{"a":' * 10_000),
    "deep lists": with_text(b'{"a":' + b"[" * 50_000),
    "number of 5000 digits": with_text(HUGE),
    "duplicate tensor": with_text(TEXT[:-1] + b"," + TEXT[TEXT.index(b'"ec_cache"') :]),
    "duplicate metadata": with_text(TEXT.replace(b'"writer"', b'"created": "1", "writer"')),
    "two tensors": edited(lambda header: header.update(other=header["ec_cache"])),
    "no tensor": edited(lambda header: header.pop("ec_cache")),
    "renamed tensor": edited(lambda header: header.update(x=header.pop("ec_cache"))),
    "no metadata": edited(lambda header: header.pop("__metadata__")),
    "metadata is a list": edited(lambda header: header.update(__metadata__=[])),
    "metadata lacks a field": edited(lambda header: header["__metadata__"].pop("checksum")),
    "unknown metadata": metadata(extra="1"),
    "metadata is a number": metadata(created=1_700_000_000),
    "metadata is null": metadata(mm_hash=None),
    "unknown version": metadata(format_version="2"),
    "cut mm_hash": metadata(mm_hash="a" * 63),
    "surrogate in mm_hash": metadata(mm_hash="\ud800"),
    "other checksum": metadata(checksum="0" * 16),
    "no checksum": metadata(checksum=""),
    "unknown dtype": tensor(dtype="I8"),
    "dtype is a list": tensor(dtype=["BF16"]),
    "no dimensions": tensor(shape=[]),
    "five dimensions": tensor(shape=[7, 13, 1, 1, 1]),
    "zero dimension": tensor(shape=[7, 13, 0]),
    "negative dimensions": tensor(shape=[-7, -13]),
    "one row more": tensor(shape=[8, 13]),
    "overflow": tensor(shape=[2**62, 2**62, 2**62, 2**62]),
    "overflow to the right size": tensor(shape=[2**64 + 7 * 13]),
    "float dimension": tensor(shape=[7.0, 13]),
    "NaN dimension": tensor(shape=[float("nan")]),
    "boolean dimension": tensor(shape=[True, 91]),
    "text dimension": tensor(shape=["7", "13"]),
    "shape is a number": tensor(shape=91),
    "late offset": tensor(data_offsets=[2, 182]),
    "shifted offsets": tensor(data_offsets=[2, 184]),
    "negative offset": tensor(data_offsets=[-182, 0]),
    "short offset": tensor(data_offsets=[0, 180]),
    "one offset": tensor(data_offsets=[182]),
    "boolean offset": tensor(data_offsets=[False, 182]),
    "unknown tensor field": tensor(extra=1),
    "zero payload": edited(lambda header: header["ec_cache"].update(shape=[0]), b""),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_hostile_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptEntryError):
        read(data, KEY)


def test_the_hostile_table_starts_from_a_good_entry() -> None:
    # Otherwise every row of it could be refused for the wrong reason.
    assert read(edited(lambda _: None), KEY).shape == SHAPE
    assert read(with_text(TEXT), KEY).shape == SHAPE


END_OF_TEXT = len(GOOD[: entry.payload_offset(KEY)].rstrip())
# Most of a header is padding; draw half of the places from what is not.
PLACES = st.one_of(st.integers(0, END_OF_TEXT), st.integers(0, len(GOOD)))


@given(PLACES, st.integers(0, 64), st.binary(max_size=64))
def test_damage_is_noticed_or_harmless(place: int, removed: int, inserted: bytes) -> None:
    """Flips, cuts, insertions and extensions: wherever a region is replaced by another."""
    data = GOOD[:place] + inserted + GOOD[place + removed :]
    try:
        info = read(data, KEY)
    except CorruptEntryError:
        assert data != GOOD
    else:
        assert (info.shape, info.dtype) == (SHAPE, "bfloat16")
        assert data[info.payload_offset :] == PAYLOAD


@given(PLACES, st.integers(0, 7))
def test_one_flipped_bit_is_noticed_or_harmless(place: int, bit: int) -> None:
    data = bytearray(GOOD)
    data[min(place, len(data) - 1)] ^= 1 << bit
    try:
        info = read(bytes(data), KEY)
    except CorruptEntryError:
        return
    assert (info.shape, info.dtype) == (SHAPE, "bfloat16")
    assert data[info.payload_offset :] == PAYLOAD


@given(st.binary(max_size=5000))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptEntryError):
        read(data, KEY)
