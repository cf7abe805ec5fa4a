"""The encoder cache as its users see it: put, get and contains by ``mm_hash``."""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from lmcache_ec import entry
from lmcache_ec.backends.index import CachePolicy
from lmcache_ec.backends.local_cpu import Lease, LocalCPUBackend
from lmcache_ec.backends.local_disk import LocalDiskBackend
from lmcache_ec.errors import ConfigError, InvalidKeyError
from lmcache_ec.events import Events
from lmcache_ec.fetch import ABSENT, Fetch
from lmcache_ec.key import CacheEngineKey, ECMetadata, Namespace
from lmcache_ec.storage_manager import StorageManager

if TYPE_CHECKING:
    from types import TracebackType

    from lmcache_ec.backends.base import Backend
    from lmcache_ec.config import ECEngineConfig

HUGE_BYTES = 32 << 20  # from here on glibc's malloc maps new memory for every tensor
CLOSE_TIMEOUT_S = 10.0  # how long close() waits for what is queued to reach the tiers below


class ECCacheEngine:
    """Keeps encoder outputs under the hash of their input. Thread-safe; a context manager.

    What one process puts, every other process of this user on this host gets at once, if it made
    its engine with the same metadata, dtype, ``namespace`` and ``epoch``. With ``local_disk`` set,
    it is also found after a restart, and by other hosts that share the directory.

    Args:
        config: From :func:`lmcache_ec.load_ec_engine_config`.
        metadata: Identity of the encoder. Change it whenever outputs may change.
        encoder_dtype: dtype in which outputs are kept; never the KV cache's.
        events: Where everything is counted; by default the engine's own.

    Raises:
        ConfigError: A setting or a directory cannot be used; says which, and the remedy.
        BackendError: The tmpfs has no room for the memory tier at all.
    """

    def __init__(
        self,
        config: ECEngineConfig,
        metadata: ECMetadata,
        encoder_dtype: torch.dtype,
        events: Events | None = None,
    ) -> None:
        dtype = str(encoder_dtype).removeprefix("torch.")
        if dtype not in entry.DTYPES:
            raise ConfigError(
                f"encoder_dtype: {dtype} is not one of {', '.join(sorted(entry.DTYPES))}"
            )
        self.config = config
        self.encoder_dtype = encoder_dtype
        self.events = events or Events()
        self.namespace = Namespace(metadata, dtype, config.namespace, config.epoch)
        try:
            entry.payload_offset(self._key(""))
        except InvalidKeyError as error:
            raise ConfigError(f"metadata, namespace and epoch: {error}") from error
        tiers: list[Backend] = []
        if config.local_disk is not None:
            tiers.append(
                LocalDiskBackend(Path(config.local_disk), config.max_local_disk_bytes, self.events)
            )
        self.memory = LocalCPUBackend(
            Path(config.shm_path),
            config.max_local_cpu_bytes,
            CachePolicy(config.cache_policy),
            self.events,
        )
        self._storage = StorageManager(self.memory, tiers, config.max_queue_bytes, self.events)

    # ------------------------------------------------------------------ the seed's three verbs

    def contains(self, mm_hash: str) -> bool:
        """Whether some tier has the entry now. May do I/O; promises nothing about a later get.

        Raises:
            InvalidKeyError: ``mm_hash`` is not text of at most 4096 bytes of UTF-8.
        """
        return self._storage.contains(self._key(mm_hash))

    def put(self, mm_hash: str, tensor: torch.Tensor) -> bool:
        """Keep a copy of ``tensor``, cast to ``encoder_dtype``.

        Args:
            mm_hash: Hash of the encoder's input.
            tensor: ``[tokens, dim]`` as a rule (1 to 4 dimensions, none empty), any floating
                dtype, any device; it may be changed or freed once this returns.

        Returns:
            True: submitted. Every process of the host can get it; the tiers below have it after
            :meth:`flush`, unless they fail. False: memory has no room for it now.

        Raises:
            InvalidKeyError: ``mm_hash`` or ``tensor`` is of a kind that can never be kept.
        """
        key = self._key(mm_hash)
        shape = tuple(tensor.shape)
        if not 1 <= len(shape) <= entry.MAX_NDIM or tensor.numel() == 0:
            raise InvalidKeyError(
                f"tensor of shape {shape} for {mm_hash[:40]!r}: expected 1 to {entry.MAX_NDIM} "
                "dimensions, none of them empty"
            )
        if not tensor.is_floating_point():
            raise InvalidKeyError(
                f"tensor of dtype {tensor.dtype} for {mm_hash[:40]!r}: expected a floating dtype"
            )
        return self._storage.put(key, tensor.detach())

    def get(self, mm_hash: str, device: str | torch.device) -> torch.Tensor | None:
        """The tensor as it was put, on ``device``; None only for a miss.

        It is a copy that the caller may keep and change. May wait for disk or network.

        Raises:
            InvalidKeyError: ``mm_hash`` is not text of at most 4096 bytes of UTF-8.
        """
        key = self._key(mm_hash)
        lease = self._storage.lease(key) or self._wait(key)
        if lease is None:
            return None
        self._storage.count_hit(lease)
        try:
            tensor = lease.tensor
            if torch.device(device).type == "cpu" and tensor.nbytes >= HUGE_BYTES:
                return _huge_like(tensor).copy_(tensor)
            return tensor.to(device, copy=True)
        finally:
            lease.release()

    # ------------------------------------------------------------------ for the connector

    def lease(self, mm_hash: str) -> Lease | None:
        """Pin the entry if memory has it; tens of microseconds, no I/O, not counted.

        Raises:
            InvalidKeyError: ``mm_hash`` is not text of at most 4096 bytes of UTF-8.
        """
        return self._storage.lease(self._key(mm_hash))

    def count_hit(self, lease: Lease) -> None:
        """Count that a leased entry is used, as :meth:`get` does by itself."""
        self._storage.count_hit(lease)

    def prefetch(self, mm_hash: str) -> Fetch:
        """Bring the entry from the tiers below into memory, in the background. Never blocks.

        Raises:
            InvalidKeyError: ``mm_hash`` is not text of at most 4096 bytes of UTF-8.
        """
        return self._storage.prefetch(self._key(mm_hash))

    @property
    def has_tiers(self) -> bool:
        """Whether there is any tier below memory, from which a prefetch could bring something."""
        return self._storage.has_tiers

    @property
    def pending_bytes(self) -> int:
        """Bytes pinned in memory until they are written down."""
        return self._storage.pending_bytes

    # ------------------------------------------------------------------ the end

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until all that was put has reached the tiers below; False on time-out."""
        return self._storage.flush(timeout_s)

    def close(self) -> None:
        """Write down what is queued, for at most ``CLOSE_TIMEOUT_S``, and leave. Idempotent."""
        self._storage.close(CLOSE_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _key(self, mm_hash: str) -> CacheEngineKey:
        return CacheEngineKey(self.namespace, mm_hash)

    def _wait(self, key: CacheEngineKey) -> Lease | None:
        if not self.has_tiers:
            self.events.count("misses", ABSENT)
            return None
        fetch = self._storage.prefetch(key)
        try:
            fetch.wait()
            lease = fetch.take()
        finally:
            fetch.drop()
        if lease is None:
            self.events.count("misses", fetch.reason)
        return lease


def _huge_like(tensor: torch.Tensor) -> torch.Tensor:
    """An uninitialized CPU tensor of that shape and dtype, in huge pages if the kernel has them.

    Page faults in memory fresh from the kernel take longer than the copy into it; a huge page
    takes one fault where small ones take 512.
    """
    memory = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
