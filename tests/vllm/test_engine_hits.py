"""Real engines in this process: the encoder is skipped, and no token differs."""

from __future__ import annotations

import io
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from lmcache_ec.errors import ConfigError
from lmcache_ec.testing.media import noise_picture, tone
from lmcache_ec.testing.vllm_server import InProcessLLM, chat_messages

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.vllm.conftest import OpenEngine

TEXT = "What is this?"


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A connector with a memory and a disk tier of its own; nothing of them may stay in memory."""
    shm = Path(tempfile.mkdtemp(prefix="lmcache-ec-test-", dir="/dev/shm"))
    yield {
        "ec_connector": "LMCacheECConnector",
        "ec_role": "ec_both",
        "ec_connector_extra_config": {
            "shm_path": str(shm),
            "local_disk": str(tmp_path / "disk"),
            "max_local_cpu_size": 0.05,
            "prefetch_timeout_ms": 60_000,
        },
    }
    left = [path.name for path in shm.iterdir()]
    shutil.rmtree(shm)
    assert left == []


def memory_only(ec: dict[str, Any], **more: Any) -> dict[str, Any]:
    extra = {**ec["ec_connector_extra_config"], "local_disk": None, **more}
    return {**ec, "ec_connector_extra_config": extra}


def generate(
    engine: InProcessLLM, prompts: Sequence[Sequence[bytes]], max_tokens: int = 8
) -> list[list[int]]:
    """Answers to several prompts, each with its pictures, which the engine serves together."""
    from vllm import SamplingParams

    results = engine.llm.chat(
        [chat_messages(TEXT, pictures) for pictures in prompts],
        SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        use_tqdm=False,
    )
    return [list(result.outputs[0].token_ids) for result in results]


def half(engine: InProcessLLM) -> Any:
    """The scheduler half of an engine's connector."""
    core = engine.llm.llm_engine.engine_core.engine_core
    return core.scheduler.ec_connector._scheduler


def wait_until_saved(engine: InProcessLLM, entries: int) -> None:
    """Saves are made in the background; wait until so many are in memory and below."""
    scheduler = half(engine)
    deadline = time.monotonic() + 20
    while (
        scheduler.engine.memory.usage().entries < entries or scheduler.engine.memory.usage().pinned
    ):
        assert time.monotonic() < deadline, scheduler.engine.memory.usage()
        time.sleep(0.01)


def hits(engine: InProcessLLM, tier: str) -> int:
    return int(half(engine).engine.events.value("hits", tier))


@pytest.mark.parametrize("model", ["qwen2_vl", "qwen3_vl", "idefics3", "qwen2_audio"])
def test_hits_in_one_process_and_after_a_restart(
    model: str, open_engine: OpenEngine, tiers: dict[str, Any]
) -> None:
    media: dict[str, Any] = (
        {"audios": [tone(400)]} if model == "qwen2_audio" else {"images": [noise_picture(1)]}
    )
    with open_engine(model) as engine:
        expected = engine.generate(TEXT, **media)
        assert engine.encoded_items() >= 1
    with open_engine(model, tiers) as engine:
        assert engine.generate(TEXT, **media) == expected
        encoded = engine.encoded_items()
        assert encoded >= 1
        wait_until_saved(engine, encoded)
        engine.reset_caches()
        assert engine.generate(TEXT, **media) == expected
        assert engine.encoded_items() == 0
        assert hits(engine, "memory") == encoded
    with open_engine(model, tiers) as engine:
        assert engine.generate(TEXT, **media) == expected
        assert engine.encoded_items() == 0
        assert (hits(engine, "memory"), hits(engine, "disk")) == (0, encoded)
        wait_until_saved(engine, encoded)  # and no pin is left


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"enable_prefix_caching": False}, id="no prefix caching"),
        pytest.param(
            {"max_num_batched_tokens": 48, "enable_chunked_prefill": True}, id="chunked prefill"
        ),
        pytest.param({"async_scheduling": True}, id="async scheduling"),
    ],
)
def test_several_and_repeated_images(
    open_engine: OpenEngine, tiers: dict[str, Any], options: dict[str, Any]
) -> None:
    """Several images in a prompt, one twice in a prompt, one in two concurrent requests."""
    a, b, c = (noise_picture(seed) for seed in (1, 2, 3))
    prompts = [[a, b], [c, c], [b], [b, a, c]]
    with open_engine("qwen2_vl", **options) as engine:
        expected = generate(engine, prompts)
    with open_engine("qwen2_vl", tiers, **options) as engine:
        assert generate(engine, prompts) == expected
        assert engine.encoded_items() == 3
        wait_until_saved(engine, 3)
        engine.reset_caches()
        assert generate(engine, prompts) == expected
        assert engine.encoded_items() == 0
    with open_engine("qwen2_vl", tiers, **options) as engine:
        assert generate(engine, prompts) == expected
        assert engine.encoded_items() == 0
        assert half(engine).engine.memory.usage().pinned == 0


def test_preemption_under_a_tiny_kv_cache(open_engine: OpenEngine, tiers: dict[str, Any]) -> None:
    options: dict[str, Any] = {
        "num_gpu_blocks_override": 8,
        "block_size": 32,
        "max_model_len": 160,
        "enable_prefix_caching": False,
    }
    prompts = [[noise_picture(seed)] for seed in (1, 2, 3, 4)]
    with open_engine("qwen2_vl", **options) as engine:
        expected = generate(engine, prompts, max_tokens=64)
    with open_engine("qwen2_vl", tiers, **options) as engine:
        preempted = watch_preemptions(engine)
        assert generate(engine, prompts, max_tokens=64) == expected
        wait_until_saved(engine, 4)
        engine.reset_caches()
        engine.encoded_items()
        assert generate(engine, prompts, max_tokens=64) == expected
        assert preempted
        assert engine.encoded_items() == 0
        wait_until_saved(engine, 4)


def watch_preemptions(engine: InProcessLLM) -> list[str]:
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    preempted: list[str] = []
    original = scheduler._preempt_request

    def preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return original(request, *args, **kwargs)

    scheduler._preempt_request = preempt
    return preempted


class SlowTier:
    """A real tier whose reads wait until they are let go."""

    def __init__(self, tier: Any) -> None:
        self._tier = tier
        self.reading = threading.Event()
        self.go = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def get(self, *args: Any) -> Any:
        self.reading.set()
        assert self.go.wait(30)
        return self._tier.get(*args)


def test_a_slow_read_defers_its_own_request_only_and_abort_frees_it(
    open_engine: OpenEngine, tiers: dict[str, Any]
) -> None:
    from vllm import SamplingParams

    cold, warm = noise_picture(1), noise_picture(2)
    with open_engine("qwen2_vl", tiers) as engine:
        expected = engine.generate(TEXT, [warm])
        expected_cold = engine.generate(TEXT, [cold])
        wait_until_saved(engine, 2)
    with open_engine("qwen2_vl", tiers) as engine:
        storage = half(engine).engine._storage
        slow = storage._tiers[0] = SlowTier(storage._tiers[0])
        vllm = engine.llm.llm_engine
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        prompt = {
            "prompt": "<|vision_start|><|image_pad|><|vision_end|>",
            "multi_modal_data": {"image": Image.open(io.BytesIO(cold)).convert("RGB")},
        }
        vllm.add_request("cold", prompt, params)
        while not slow.reading.is_set():
            vllm.step()
        assert not half(engine)._leased
        slow.go.set()
        assert engine.encoded_items() == 0
        # The deferred request is dropped, and what it held with it; the read itself goes on.
        vllm.abort_request(["cold"])
        assert engine.generate(TEXT, [warm]) == expected
        assert engine.encoded_items() == 0
        assert engine.generate(TEXT, [cold]) == expected_cold
        assert engine.encoded_items() == 0
        wait_until_saved(engine, 2)
        assert not half(engine)._requests


def test_a_read_past_its_budget_runs_the_encoder(
    open_engine: OpenEngine, tiers: dict[str, Any]
) -> None:
    picture = noise_picture(1)
    with open_engine("qwen2_vl", tiers) as engine:
        expected = engine.generate(TEXT, [picture])
        wait_until_saved(engine, 1)
    tiers["ec_connector_extra_config"]["prefetch_timeout_ms"] = 50
    with open_engine("qwen2_vl", tiers) as engine:
        storage = half(engine).engine._storage
        slow = storage._tiers[0] = SlowTier(storage._tiers[0])
        assert engine.generate(TEXT, [picture]) == expected
        assert engine.encoded_items() == 1
        assert half(engine).engine.events.value("misses", "timeout") == 1
        slow.go.set()


def test_new_weights_under_the_same_path_are_misses(
    open_engine: OpenEngine, tiers: dict[str, Any], tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    from lmcache_ec.testing.tiny_models import make_tiny_model
    from lmcache_ec.testing.vllm_server import in_process_llm

    model = make_tiny_model("qwen2_vl", tmp_path / "model")
    picture = noise_picture(1)
    with in_process_llm(model, tiers) as engine:
        before = engine.generate(TEXT, [picture])
        wait_until_saved(engine, 1)
    file = model / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in sorted(weights) if "visual" in name and weights[name].dim() > 1)
    weights[name] = torch.flip(weights[name], dims=[0]).contiguous()
    save_file(weights, file, metadata={"format": "pt"})
    with in_process_llm(model) as engine:
        expected = engine.generate(TEXT, [picture])
    assert expected != before
    with in_process_llm(model, tiers) as engine:
        assert engine.generate(TEXT, [picture]) == expected
        assert engine.encoded_items() == 1


def test_a_memory_tier_smaller_than_the_item_changes_nothing(
    open_engine: OpenEngine, tiers: dict[str, Any]
) -> None:
    ec = memory_only(tiers, max_local_cpu_size=1e-6)  # one page; the item takes two
    picture = noise_picture(1, 128, 128)
    with open_engine("qwen3_vl") as engine:
        expected = engine.generate(TEXT, [picture])
    with open_engine("qwen3_vl", ec) as engine:
        for _ in range(2):
            assert engine.generate(TEXT, [picture]) == expected
            assert engine.encoded_items() == 1
            engine.reset_caches()


def test_client_uuids_are_not_cached(open_engine: OpenEngine, tiers: dict[str, Any]) -> None:
    first, second = noise_picture(1), noise_picture(2)
    with open_engine("qwen2_vl") as engine:
        expected = engine.generate(TEXT, [second])
    with open_engine("qwen2_vl", tiers) as engine:
        engine.generate(TEXT, [first], uuids=["logo"])
        engine.reset_caches()
        assert engine.generate(TEXT, [second], uuids=["logo"]) == expected
        assert half(engine).engine.memory.usage().entries == 0


def test_a_uuid_that_vllm_digested_never_gives_another_picture(
    open_engine: OpenEngine, tiers: dict[str, Any]
) -> None:
    """With options in the request, its uuid looks like a hash of the media."""

    def ask(engine: InProcessLLM, picture: bytes) -> list[int]:
        from vllm import SamplingParams

        (result,) = engine.llm.chat(
            chat_messages(TEXT, [picture], uuids=["logo"]),
            SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
            mm_processor_kwargs={"max_pixels": 12544},
            use_tqdm=False,
        )
        return list(result.outputs[0].token_ids)

    first, second = noise_picture(1), noise_picture(2)
    with open_engine("qwen2_vl") as engine:
        expected = ask(engine, second)
    with open_engine("qwen2_vl", tiers) as engine:
        assert ask(engine, first) != expected
        wait_until_saved(engine, 1)
        engine.reset_caches()
        assert ask(engine, second) == expected
        assert engine.encoded_items() == 2
        wait_until_saved(engine, 2)
        engine.reset_caches()
        assert ask(engine, second) == expected
        assert engine.encoded_items() == 0


def test_an_encoder_decoder_is_refused(open_engine: OpenEngine, tiers: dict[str, Any]) -> None:
    with (
        pytest.raises(ConfigError, match=r"encoder-decoder.*remove --ec-transfer-config"),
        open_engine("whisper", tiers, max_model_len=448),
    ):
        pass


def test_a_bad_value_stops_the_start_and_is_named(
    open_engine: OpenEngine, tiers: dict[str, Any]
) -> None:
    tiers["ec_connector_extra_config"]["max_local_disk_size"] = "much"
    with (
        pytest.raises(ConfigError, match=r"max_local_disk_size.*'much'.*ec_connector_extra_config"),
        open_engine("qwen2_vl", tiers),
    ):
        pass
