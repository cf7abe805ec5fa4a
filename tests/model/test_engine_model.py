"""The engine against a dict: any sequence of verbs, evictions, restarts and damage.

A get may miss at any time. What it returns has to be what was put under that hash, since the hash
was last nowhere to be found. Tiers may hold different ones of several puts.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lmcache_ec import ECCacheEngine, ECEngineConfig, ECMetadata
from lmcache_ec.config import GIB

if TYPE_CHECKING:
    from lmcache_ec.backends.local_cpu import Lease

ARENA_BYTES = 32 * 4096
DISK_BYTES = 64 * 4096
HASHES = ["", "a", "b", "../c", "d\0", "é"]
POLICIES = ["LRU", "LFU", "FIFO", "MRU"]


def content(seed: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, 512, generator=torch.Generator().manual_seed(seed))


class EngineModel(RuleBasedStateMachine):
    """One engine at a time, with a small arena and a small disk."""

    def __init__(self) -> None:
        super().__init__()
        self.shm = Path(mkdtemp(prefix="lmcache-ec-test-", dir="/dev/shm"))
        self.may_be: dict[str, list[torch.Tensor]] = {name: [] for name in HASHES}
        self.leases: list[tuple[str, Lease, torch.Tensor]] = []
        self.start("LRU")

    def start(self, policy: str) -> None:
        config = ECEngineConfig(
            shm_path=str(self.shm),
            max_local_cpu_size=ARENA_BYTES / GIB,
            local_disk=str(self.shm / "disk"),
            max_local_disk_size=DISK_BYTES / GIB,
            cache_policy=policy,
        )
        self.engine = ECCacheEngine(config, ECMetadata("m"), torch.float32)

    def stop(self) -> None:
        for _, lease, _ in self.leases:
            lease.release()
        self.leases.clear()
        self.engine.close()
        assert {path.name for path in self.shm.iterdir()} <= {"disk"}

    def teardown(self) -> None:
        self.stop()
        shutil.rmtree(self.shm)

    def expect(self, name: str, found: torch.Tensor) -> None:
        """``found`` must be one of the tensors that can be there."""
        assert any(torch.equal(found, tensor) for tensor in self.may_be[name])

    @rule(name=st.sampled_from(HASHES), seed=st.integers(0, 3), rows=st.integers(1, 40))
    def put(self, name: str, seed: int, rows: int) -> None:
        tensor = content(seed, rows)
        was_there = self.engine.contains(name)
        if not was_there:
            self.may_be[name].clear()  # nothing older may ever come back
        if self.engine.put(name, tensor):
            self.may_be[name].append(tensor)
            if self.engine.memory.usage().pinned == 0:
                assert self.engine.contains(name)
        else:
            assert self.leases or tensor.nbytes > ARENA_BYTES or self.engine.pending_bytes

    @rule(name=st.sampled_from(HASHES))
    def get(self, name: str) -> None:
        found = self.engine.get(name, "cpu")
        if found is not None:
            self.expect(name, found)
            found.zero_()

    @rule(name=st.sampled_from(HASHES))
    def lease(self, name: str) -> None:
        lease = self.engine.lease(name)
        if lease is not None:
            self.expect(name, lease.tensor)
            self.leases.append((name, lease, lease.tensor.clone()))

    # What a tier holds depends on its threads, so nothing that is drawn may depend on it.
    @rule(number=st.integers(0, 100))
    def release(self, number: int) -> None:
        if self.leases:
            self.leases.pop(number % len(self.leases))[1].release()

    @rule()
    def flush(self) -> None:
        assert self.engine.flush()

    @rule(policy=st.sampled_from(POLICIES))
    def restart(self, policy: str) -> None:
        self.stop()
        self.start(policy)

    @rule(file=st.integers(0, 100), byte=st.integers(0, 1 << 20), bit=st.integers(0, 7))
    def damage(self, file: int, byte: int, bit: int) -> None:
        assert self.engine.flush()
        files = sorted((self.shm / "disk").glob("ec/??/*.safetensors"))
        if not files:
            return
        path = files[file % len(files)]
        content = bytearray(path.read_bytes())
        content[byte % len(content)] ^= 1 << bit
        path.write_bytes(content)

    @invariant()
    def leases_stay(self) -> None:
        for name, lease, tensor in self.leases:
            assert torch.equal(lease.tensor, tensor)
            assert self.engine.contains(name)

    @invariant()
    def tiers_are_bounded(self) -> None:
        usage = self.engine.memory.usage()
        assert usage.used <= usage.capacity == ARENA_BYTES
        self.engine.memory.arena.index.check()

    @invariant()
    def nothing_stays_pinned(self) -> None:
        assert self.engine.flush()
        held = {name: -(-t.nbytes // 4096) * 4096 for name, _, t in self.leases}
        pinned = self.engine.memory.usage().pinned
        # An entry from disk lies behind its header of one page.
        assert sum(held.values()) <= pinned <= sum(held.values()) + 4096 * len(held)
        files = (self.shm / "disk").glob("ec/??/*.safetensors")
        assert sum(path.stat().st_size for path in files) <= DISK_BYTES


TestEngineModel = EngineModel.TestCase
TestEngineModel.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
