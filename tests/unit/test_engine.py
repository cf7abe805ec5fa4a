"""The engine as its users see it: what was put comes back, or nothing does."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lmcache_ec import ConfigError, ECCacheEngine, ECEngineConfig, ECMetadata, InvalidKeyError
from lmcache_ec.config import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from pathlib import Path

METADATA = ECMetadata("model", revision="r", weights="w")
MIB = 1 << 20


@pytest.fixture
def config(shm: Path, tmp_path: Path) -> ECEngineConfig:
    return ECEngineConfig(
        shm_path=str(shm), max_local_cpu_size=MIB / GIB, local_disk=str(tmp_path / "disk")
    )


@pytest.fixture
def engine(config: ECEngineConfig) -> Iterator[ECCacheEngine]:
    with ECCacheEngine(config, METADATA, torch.bfloat16) as engine:
        yield engine
        assert engine.flush()
        assert engine.memory.usage().pinned == 0
        engine.memory.arena.index.check()


def bits(tensor: torch.Tensor | None) -> bytes | None:
    """Shape, dtype and every bit; NaNs compare equal."""
    if tensor is None:
        return None
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{tuple(tensor.shape)} {tensor.dtype} ".encode() + data


def picture(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape or (10, 64), generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_a_miss_a_put_and_a_hit(engine: ECCacheEngine) -> None:
    assert engine.get("a", "cpu") is None
    assert not engine.contains("a")
    assert engine.put("a", picture(1)) is True
    assert engine.contains("a")
    assert bits(engine.get("a", torch.device("cpu"))) == bits(picture(1))
    assert engine.events.value("misses", "absent") == 1
    assert engine.events.value("hits", "memory") == 1


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (2, 3, 4), (2, 1, 3, 4), (1, 1), (33, 2048)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.bfloat16])
def test_shapes_and_dtypes(engine: ECCacheEngine, shape: tuple[int, ...], dtype: Any) -> None:
    tensor = picture(1, *shape).to(dtype) * 1.0001
    assert engine.put("a", tensor)
    assert bits(engine.get("a", "cpu")) == bits(tensor.to(torch.bfloat16))


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2],
)
def test_encoder_dtypes(config: ECEngineConfig, dtype: torch.dtype) -> None:
    with ECCacheEngine(config, METADATA, dtype) as engine:
        assert engine.put("a", picture(1).to(dtype))
        assert bits(engine.get("a", "cpu")) == bits(picture(1).to(dtype))
    with ECCacheEngine(config, METADATA, dtype) as engine:
        assert bits(engine.get("a", "cpu")) == bits(picture(1).to(dtype))


def test_special_values_keep_their_bits(engine: ECCacheEngine) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert engine.put("a", every)
    assert bits(engine.get("a", "cpu")) == bits(every)


def views() -> dict[str, torch.Tensor]:
    base = picture(1, 20, 30)
    return {
        "transposed": base.t(),
        "rows": base[3:9],
        "columns": base[:, 5:7],
        "strided": base[::2, ::3],
        "expanded": base[:1].expand(5, 30),
        "grad": base.clone().requires_grad_(),
        "computed": base.clone().requires_grad_() * 2,
        "narrow": base.unsqueeze(1)[:, :, 3:4],
    }


@pytest.mark.parametrize("name", views())
def test_views(engine: ECCacheEngine, name: str) -> None:
    tensor = views()[name]
    assert engine.put("a", tensor)
    found = engine.get("a", "cpu")
    assert bits(found) == bits(tensor.detach())
    assert found is not None
    assert found.is_contiguous()
    assert not found.requires_grad


@pytest.mark.parametrize(
    "tensor",
    [torch.empty(0), torch.empty(0, 4), torch.empty(4, 0), torch.tensor(1.0),
     torch.zeros(1, 1, 1, 1, 1), torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2) > 0,
     torch.zeros(2, dtype=torch.complex64)],
)  # fmt: skip
def test_tensors_that_are_refused(engine: ECCacheEngine, tensor: torch.Tensor) -> None:
    with pytest.raises(InvalidKeyError, match="expected"):
        engine.put("a", tensor)
    assert not engine.contains("a")


def test_the_source_may_change_once_put_returns(engine: ECCacheEngine) -> None:
    tensor = picture(1)
    engine.put("a", tensor)
    tensor.zero_()
    assert engine.flush()
    assert bits(engine.get("a", "cpu")) == bits(picture(1))


@pytest.mark.parametrize("shape", [(10, 64), (9 << 10, 2048)])  # the second one: 36 MiB
def test_a_result_is_the_callers_own(config: ECEngineConfig, shape: tuple[int, int]) -> None:
    config = replace(config, max_local_cpu_size=64 * MIB / GIB)
    with ECCacheEngine(config, METADATA, torch.bfloat16) as engine:
        tensor = picture(1, *shape)
        assert engine.put("a", tensor)
        result = engine.get("a", "cpu")
        assert result is not None
        result.zero_()
        again = engine.get("a", "cpu")
        assert again is not None
        assert torch.equal(again, tensor)
    assert torch.equal(again, tensor)  # and it outlives the engine


def test_the_first_put_stays(engine: ECCacheEngine) -> None:
    assert engine.put("a", picture(1))
    assert engine.put("a", picture(2))
    assert bits(engine.get("a", "cpu")) == bits(picture(1))


def test_what_is_too_large_or_has_no_room_is_not_kept(engine: ECCacheEngine) -> None:
    assert engine.put("large", torch.zeros(MIB // 2 + 1)) is False
    assert engine.put("a", torch.zeros(MIB // 2))  # all of it
    lease = engine.lease("a")
    assert lease is not None
    assert engine.put("b", picture(1)) is False
    assert engine.events.value("drops", "memory_full") == 2
    assert engine.flush()
    lease.release()
    assert engine.put("b", picture(1)) is True
    assert bits(engine.get("b", "cpu")) == bits(picture(1))


def test_a_disk_entry_is_a_miss_while_memory_is_full_of_leases(engine: ECCacheEngine) -> None:
    assert engine.put("a", picture(1))
    assert engine.flush()
    assert engine.put("b", torch.zeros(MIB // 2))
    assert engine.flush()
    lease = engine.lease("b")
    assert lease is not None
    assert engine.contains("a")
    assert engine.get("a", "cpu") is None
    assert engine.events.value("misses", "memory_full") == 1
    lease.release()
    assert bits(engine.get("a", "cpu")) == bits(picture(1))


HASHES = ["", "\0", "a\0b", "../../etc/passwd", "/etc/passwd", "a\nb", "é" * 2048, "x" * 4096, "."]


def test_any_text_names_its_own_entry(config: ECEngineConfig, tmp_path: Path) -> None:
    with ECCacheEngine(config, METADATA, torch.bfloat16) as engine:
        for seed, mm_hash in enumerate(HASHES):
            assert engine.put(mm_hash, picture(seed))
    with ECCacheEngine(config, METADATA, torch.bfloat16) as engine:
        for seed, mm_hash in enumerate(HASHES):
            assert bits(engine.get(mm_hash, "cpu")) == bits(picture(seed))
        assert engine.events.value("hits", "disk") == len(HASHES)
    assert {path.name for path in tmp_path.iterdir()} == {"disk"}
    assert {path.name for path in (tmp_path / "disk").iterdir()} == {"ec"}


@pytest.mark.parametrize("mm_hash", ["x" * MIB, "é" * 2049, "\ud800", None, 7, b"x", ["x"]])
def test_hashes_that_are_refused(engine: ECCacheEngine, mm_hash: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: engine.put(mm_hash, picture(1)),
        lambda: engine.get(mm_hash, "cpu"),
        lambda: engine.contains(mm_hash),
        lambda: engine.lease(mm_hash),
        lambda: engine.prefetch(mm_hash),
    ]
    for call in calls:
        with pytest.raises(InvalidKeyError, match="mm_hash"):
            call()


@pytest.mark.parametrize(("namespace", "epoch"), [("2", ""), ("", "2")])
def test_settings_isolate(
    engine: ECCacheEngine, config: ECEngineConfig, namespace: str, epoch: str
) -> None:
    assert engine.put("a", picture(1))
    assert engine.flush()
    config = replace(config, namespace=namespace, epoch=epoch)
    with ECCacheEngine(config, METADATA, torch.bfloat16) as other:
        isolated(engine, other)


@pytest.mark.parametrize("field", list(ECMetadata.__dataclass_fields__))
def test_encoders_isolate(engine: ECCacheEngine, config: ECEngineConfig, field: str) -> None:
    assert engine.put("a", picture(1))
    assert engine.flush()
    metadata = replace(METADATA, **{field: "2"})
    with ECCacheEngine(config, metadata, torch.bfloat16) as other:
        isolated(engine, other)


def test_dtypes_isolate(engine: ECCacheEngine, config: ECEngineConfig) -> None:
    assert engine.put("a", picture(1))
    assert engine.flush()
    with ECCacheEngine(config, METADATA, torch.float16) as other:
        isolated(engine, other)


def isolated(engine: ECCacheEngine, other: ECCacheEngine) -> None:
    assert not other.contains("a")
    assert other.get("a", "cpu") is None
    assert other.put("a", picture(2))
    assert bits(other.get("a", "cpu")) == bits(picture(2).to(other.encoder_dtype))
    assert bits(engine.get("a", "cpu")) == bits(picture(1))


def test_equal_engines_of_one_process_share(engine: ECCacheEngine, config: ECEngineConfig) -> None:
    other = ECCacheEngine(config, METADATA, torch.bfloat16)
    assert other.put("a", picture(1))
    other.close()
    other.close()
    assert bits(engine.get("a", "cpu")) == bits(picture(1))
    assert other.get("a", "cpu") is None
    assert other.put("b", picture(2)) is False


def test_a_restart_finds_everything_on_disk(config: ECEngineConfig, shm: Path) -> None:
    with ECCacheEngine(config, METADATA, torch.bfloat16) as engine:
        assert all(engine.put(str(seed), picture(seed)) for seed in range(20))
    assert list(shm.iterdir()) == []
    with ECCacheEngine(config, METADATA, torch.bfloat16) as engine:
        for seed in range(20):
            assert engine.contains(str(seed))
            assert bits(engine.get(str(seed), "cpu")) == bits(picture(seed))
            assert bits(engine.get(str(seed), "cpu")) == bits(picture(seed))
        assert engine.events.value("hits", "disk") == 20
        assert engine.events.value("hits", "memory") == 20


def test_without_a_disk_nothing_outlives_the_engine(config: ECEngineConfig) -> None:
    config = replace(config, local_disk=None)
    with ECCacheEngine(config, METADATA, torch.bfloat16) as engine:
        assert not engine.has_tiers
        assert engine.put("a", picture(1))
        assert engine.flush()
        assert bits(engine.get("a", "cpu")) == bits(picture(1))
    with ECCacheEngine(config, METADATA, torch.bfloat16) as engine:
        assert engine.get("a", "cpu") is None


def test_bad_settings_are_named(config: ECEngineConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="encoder_dtype: int8 is not one of"):
        ECCacheEngine(config, METADATA, torch.int8)
    with pytest.raises(ConfigError, match="shm_path"):
        ECCacheEngine(replace(config, shm_path=str(tmp_path / "no")), METADATA, torch.bfloat16)
    with pytest.raises(ConfigError, match="shorten the namespace"):
        ECCacheEngine(config, replace(METADATA, output_format="x" * 70000), torch.bfloat16)


def other_engine(connection: Connection, config: ECEngineConfig) -> None:
    with ECCacheEngine(config, METADATA, torch.bfloat16) as engine:
        while (question := connection.recv()) is not None:
            verb, mm_hash, seed = question
            if verb == "put":
                connection.send(engine.put(mm_hash, picture(seed)))
            elif verb == "lease":
                connection.send(engine.lease(mm_hash) is not None)
            else:
                connection.send(bits(engine.get(mm_hash, "cpu")))


def test_engines_of_two_processes(
    config: ECEngineConfig, shm: Path, start: Callable[..., Any]
) -> None:
    first, second = start(other_engine, config), start(other_engine, config)
    assert first.ask(("put", "a", 1))
    assert second.ask(("get", "a", 0)) == bits(picture(1))
    assert second.ask(("put", "b", 2))
    assert first.ask(("get", "b", 0)) == bits(picture(2))
    assert first.ask(("lease", "b", 0))
    first.kill()
    second.kill()
    # No memory tier left behind: the next engine takes it over, warm and without pins.
    with ECCacheEngine(config, METADATA, torch.bfloat16) as engine:
        assert engine.memory.usage().pinned == 0
        assert bits(engine.get("a", "cpu")) == bits(picture(1))
        assert bits(engine.get("b", "cpu")) == bits(picture(2))
        assert engine.events.value("hits", "memory") == 2
    assert list(shm.iterdir()) == []


def test_threads_get_no_wrong_byte(engine: ECCacheEngine) -> None:
    # 40 entries of 64 KiB in an arena of 1 MiB: eviction, fetches and write-downs overlap.
    pictures = [picture(seed, 32, 1024) for seed in range(40)]
    wrong: list[int] = []
    hits: list[int] = []

    def work(seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        for _ in range(150):
            number = int(torch.randint(40, (1,), generator=random))
            found = engine.get(str(number), "cpu")
            if found is None:
                engine.put(str(number), pictures[number])
            elif torch.equal(found, pictures[number]):
                hits.append(number)
            else:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert hits


SCRIPT = """
import sys
import torch
from lmcache_ec import ECCacheEngine, ECEngineConfig, ECMetadata
config = ECEngineConfig(shm_path=sys.argv[1], local_disk=sys.argv[2], max_local_cpu_size=0.01)
engine = ECCacheEngine(config, ECMetadata("model", revision="r", weights="w"), torch.bfloat16)
for number in range(256):  # more than the disk can write before the script ends
    engine.put(str(number), torch.full((10, 1000), float(number)))
print(sorted({name.split(".")[0] for name in sys.modules} & {"vllm", "redis", "boto3", "lmcache"}))
"""


def test_a_script_that_forgets_to_close(config: ECEngineConfig, shm: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, shm, config.local_disk or ""],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[]\n", "")
    assert list(shm.iterdir()) == []
    with ECCacheEngine(config, METADATA, torch.bfloat16) as engine:
        for number in range(256):
            found = engine.get(str(number), "cpu")
            assert found is not None
            assert bool((found == number).all())
