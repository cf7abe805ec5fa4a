"""The faulty tier without a script is the tier below it; with one, it harms as it says."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
import torch

from lmcache_ec import ECCacheEngine, ECEngineConfig, ECMetadata
from lmcache_ec.backends.base import Backend
from lmcache_ec.backends.local_disk import LocalDiskBackend
from lmcache_ec.errors import BackendError
from lmcache_ec.events import Events
from lmcache_ec.testing.backend_suite import BackendSuite, Buffers, make_bytes, make_key, read
from lmcache_ec.testing.faults import FaultyTier, TierFault, TierScript

if TYPE_CHECKING:
    from lmcache_ec.key import CacheEngineKey

DATA = make_bytes(1000)


class TestFaultyTier(BackendSuite):
    """Without a script, over a real directory."""

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.path = tmp_path / "disk"

    def open(self) -> FaultyTier:
        return FaultyTier(LocalDiskBackend(self.path, 1 << 30, Events()))

    def file(self, key: CacheEngineKey) -> Path:
        return self.path / "ec" / key.name[:2] / f"{key.name}.safetensors"

    def raw_read(self, key: CacheEngineKey) -> bytes | None:
        return self.file(key).read_bytes() if self.file(key).exists() else None

    def raw_write(self, key: CacheEngineKey, data: bytes) -> None:
        self.file(key).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.file(key).write_bytes(data)


@pytest.fixture
def real(tmp_path: Path) -> LocalDiskBackend:
    """A tier that has one entry."""
    real = LocalDiskBackend(tmp_path / "disk", 1 << 30, Events())
    real.put(make_key(), [memoryview(DATA)])
    return real


def at(verb: str, fault: TierFault | float) -> TierScript:
    return lambda name: fault if name == verb else None


def call(tier: FaultyTier, verb: str) -> object:
    arguments = {"get": (make_key(), Buffers()), "put": (make_key(), [memoryview(DATA)])}
    return getattr(tier, verb)(*arguments.get(verb, () if verb == "close" else (make_key(),)))


@pytest.mark.parametrize("verb", [name for name in vars(Backend) if not name.startswith("_")])
def test_every_verb_asks_the_script(real: LocalDiskBackend, verb: str) -> None:
    asked: list[str] = []
    tier = FaultyTier(real, asked.append)
    call(tier, verb)
    assert asked == [verb]
    tier.script = at(verb, TierFault.ERROR)
    with pytest.raises(BackendError, match=f"disk: {verb} fails"):
        call(tier, verb)
    tier.script = at(verb, 0.001)
    call(tier, verb)


def test_damaged_on_the_way_out(real: LocalDiskBackend) -> None:
    tier = FaultyTier(real, at("get", TierFault.TRUNCATED))
    assert read(tier, make_key()) == DATA[:500]
    assert tier.get(make_key(), Buffers(refuse=True)) is None
    tier.script = at("get", TierFault.GARBAGE)
    buffers = Buffers()
    view = tier.get(make_key(), buffers)
    assert view is buffers.given
    assert view is not None
    assert bytes(view) != DATA
    assert buffers.asked == [len(DATA)]
    assert bytes(view) == read(FaultyTier(real, tier.script), make_key()), "the seed decides"
    assert bytes(view) != read(FaultyTier(real, tier.script, seed=1), make_key())
    assert tier.get(make_key("absent"), Buffers()) is None
    assert read(real, make_key()) == DATA


def test_damaged_on_the_way_in(real: LocalDiskBackend) -> None:
    tier = FaultyTier(real, at("put", TierFault.TRUNCATED))
    tier.put(make_key("half"), [memoryview(DATA[:300]), memoryview(DATA[300:])])
    assert read(real, make_key("half")) == DATA[:500]
    tier.script = at("put", TierFault.GARBAGE)
    tier.put(make_key("other"), [memoryview(DATA)])
    found = read(real, make_key("other"))
    assert found is not None
    assert len(found) == len(DATA)
    assert found != DATA
    tier.script = at("put", TierFault.VANISHED)
    tier.put(make_key("lost"), [memoryview(DATA)])
    assert not real.contains(make_key("lost"))


@pytest.mark.parametrize("verb", ["contains", "get", "delete"])
def test_vanished(real: LocalDiskBackend, verb: str) -> None:
    assert not call(FaultyTier(real, at(verb, TierFault.VANISHED)), verb)
    assert not real.contains(make_key())


@pytest.mark.parametrize("fault", TierFault)
@pytest.mark.parametrize("verb", ["contains", "get", "put", "delete", "close"])
def test_no_fault_gets_through_the_engine(tmp_path: Path, verb: str, fault: TierFault) -> None:
    tensor = torch.ones(4, 512)
    with TemporaryDirectory(prefix="lmcache-ec-test-", dir="/dev/shm") as shm:
        config = ECEngineConfig(shm_path=shm, local_disk=str(tmp_path), max_local_cpu_size=2**-10)
        for _ in range(2):  # then from the disk
            engine = ECCacheEngine(config, ECMetadata("m"), torch.float32)
            tiers = engine._storage._tiers
            tiers[0] = FaultyTier(tiers[0], at(verb, fault))
            engine.contains("a")
            found = engine.get("a", "cpu")
            assert found is None or torch.equal(found, tensor)
            assert engine.put("a", tensor)
            assert engine.flush()
            assert engine.memory.usage().pinned == 0
            engine.close()
            assert list(Path(shm).iterdir()) == [], "memory is given back"
