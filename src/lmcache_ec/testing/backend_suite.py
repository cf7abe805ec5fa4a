"""What every tier below memory must do, as tests to subclass.

A tier's own test file says how to make one, and how to reach its storage by another way::

    class TestMyTier(BackendSuite):
        def open(self) -> Backend: ...
        def raw_read(self, key) -> bytes | None: ...
        def raw_write(self, key, data) -> None: ...

pytest finds and runs the rest. The suite's own methods need pytest; nothing else of it does.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

from lmcache_ec.key import CacheEngineKey, ECMetadata, Namespace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lmcache_ec.backends.base import Backend

SIZES = (1, 4095, 4096, 4097, 3_000_001)
"""Bytes of an entry: around a page, and more than one system call moves at once."""

HOSTILE = ("", "\0", "\n", "../../etc/passwd", "/etc/passwd", "a/b", "é\u202e", "x" * 4096)
"""Texts that a client could make an ``mm_hash`` of."""


def make_key(
    mm_hash: str = "hash", model: str = "model", dtype: str = "bfloat16"
) -> CacheEngineKey:
    """A key of some encoder."""
    return CacheEngineKey(Namespace(ECMetadata(model), dtype), mm_hash)


def make_bytes(size: int, seed: int = 0) -> bytes:
    """Bytes that no other seed gives."""
    return np.random.default_rng(seed).bytes(size)


class Buffers:
    """An ``Allocate`` that remembers what it was asked for."""

    def __init__(self, *, refuse: bool = False) -> None:
        self.asked: list[int] = []
        self.given: memoryview | None = None
        self._refuse = refuse

    def __call__(self, nbytes: int) -> memoryview | None:
        """Room for ``nbytes``, filled with what no test stores."""
        self.asked.append(nbytes)
        if self._refuse:
            return None
        self.given = memoryview(bytearray(b"\xa5" * nbytes))
        return self.given


def read(backend: Backend, key: CacheEngineKey) -> bytes | None:
    """The entry as the tier gives it."""
    view = backend.get(key, Buffers())
    return None if view is None else bytes(view)


class BackendSuite(ABC):
    """Conformance tests of one tier; see the module's docstring."""

    @abstractmethod
    def open(self) -> Backend:
        """The tier over one storage, the same for every call within one test."""

    @abstractmethod
    def raw_read(self, key: CacheEngineKey) -> bytes | None:
        """What the storage holds under the key's name, not asked through the tier."""

    @abstractmethod
    def raw_write(self, key: CacheEngineKey, data: bytes) -> None:
        """Put bytes into the storage under the key's name, not through the tier."""

    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        """The tier under test."""
        backend = self.open()
        yield backend
        backend.close()

    def test_has_a_name(self, backend: Backend) -> None:
        assert backend.name
        assert backend.name == backend.name.lower()

    def test_an_absent_entry_is_no_failure(self, backend: Backend) -> None:
        buffers = Buffers()
        assert not backend.contains(make_key())
        assert backend.get(make_key(), buffers) is None
        assert buffers.asked == []
        backend.delete(make_key())

    @pytest.mark.parametrize("size", SIZES)
    def test_what_was_put_comes_back(self, backend: Backend, size: int) -> None:
        data, buffers = make_bytes(size), Buffers()
        backend.put(make_key(), [memoryview(data)])
        assert backend.contains(make_key())
        view = backend.get(make_key(), buffers)
        assert buffers.asked == [size]
        assert view is buffers.given
        assert view is not None
        assert bytes(view) == data
        assert self.raw_read(make_key()) == data

    def test_parts_are_one_entry(self, backend: Backend) -> None:
        parts = [make_bytes(size, seed) for seed, size in enumerate((4096, 1, 0, 100_003))]
        backend.put(make_key(), [memoryview(part) for part in parts])
        assert read(backend, make_key()) == b"".join(parts)

    def test_parts_are_used_during_the_call_only(self, backend: Backend) -> None:
        data = bytearray(make_bytes(70_000))
        before = bytes(data)
        with memoryview(data) as part:
            backend.put(make_key(), [part])
        data[:] = b"\0" * len(data)
        data.clear()  # fails while anyone exports it
        assert read(backend, make_key()) == before

    def test_room_that_is_refused_is_a_miss(self, backend: Backend) -> None:
        backend.put(make_key(), [memoryview(make_bytes(10))])
        buffers = Buffers(refuse=True)
        assert backend.get(make_key(), buffers) is None
        assert buffers.asked == [10]
        assert backend.contains(make_key())

    def test_a_second_put_leaves_one_whole_entry(self, backend: Backend) -> None:
        first, second = make_bytes(5000, 1), make_bytes(6000, 2)
        backend.put(make_key(), [memoryview(first)])
        backend.put(make_key(), [memoryview(second)])
        assert read(backend, make_key()) in (first, second)

    def test_a_deleted_entry_is_gone_and_can_come_back(self, backend: Backend) -> None:
        backend.put(make_key(), [memoryview(make_bytes(10, 1))])
        backend.delete(make_key())
        assert not backend.contains(make_key())
        assert read(backend, make_key()) is None
        assert self.raw_read(make_key()) is None
        backend.put(make_key(), [memoryview(make_bytes(10, 2))])
        assert read(backend, make_key()) == make_bytes(10, 2)

    def test_keys_never_share_an_entry(self, backend: Backend) -> None:
        keys = [make_key(text) for text in HOSTILE]
        keys += [make_key(model="other"), make_key(dtype="float32"), make_key()]
        for number, key in enumerate(keys):
            backend.put(key, [memoryview(make_bytes(100, number))])
        for number, key in enumerate(keys):
            assert read(backend, key) == make_bytes(100, number)

    def test_bytes_are_not_looked_into(self, backend: Backend) -> None:
        """Whatever lies under the name comes back as it is; who asked verifies it."""
        self.raw_write(make_key(), b"not an entry")
        assert backend.contains(make_key())
        assert read(backend, make_key()) == b"not an entry"
        backend.delete(make_key())
        assert self.raw_read(make_key()) is None

    def test_entries_outlive_the_tier(self) -> None:
        first = self.open()
        first.put(make_key(), [memoryview(make_bytes(5000))])
        first.close()
        second = self.open()
        assert read(second, make_key()) == make_bytes(5000)
        second.close()

    def test_closing_twice_is_closing_once(self) -> None:
        backend = self.open()
        backend.close()
        backend.close()

    def test_threads_see_whole_entries_only(self, backend: Backend) -> None:
        keys = [make_key(str(number)) for number in range(4)]
        data = {key: make_bytes(200_000, number) for number, key in enumerate(keys)}
        stop = threading.Event()
        torn: list[CacheEngineKey] = []

        def put_and_delete() -> None:
            for _ in range(30):
                for key in keys:
                    backend.put(key, [memoryview(data[key])])
                backend.delete(keys[0])
            stop.set()

        def get() -> int:
            found = 0
            while not stop.is_set():
                for key in keys:
                    value = read(backend, key)
                    found += value is not None
                    if value not in (None, data[key]):
                        torn.append(key)
            return found

        with ThreadPoolExecutor(4) as pool:
            readers = [pool.submit(get) for _ in range(3)]
            pool.submit(put_and_delete).result()
        assert torn == []
        assert sum(reader.result() for reader in readers) > 0
