"""Real engines under faults: damaged files, aborts at any step, no memory tier, lost reports."""

from __future__ import annotations

import io
import random
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from lmcache_ec.backends.arena import arena_directory
from lmcache_ec.testing.media import noise_picture

if TYPE_CHECKING:
    from tests.vllm.conftest import OpenEngine

    from lmcache_ec.testing.vllm_server import InProcessLLM

TEXT = "What is this?"
ITEM = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture
def ec(memory_dir: Path, tmp_path: Path) -> dict[str, Any]:
    """A connector with a memory tier of 15 pages and a disk tier."""
    return {
        "ec_connector": "LMCacheECConnector",
        "ec_role": "ec_both",
        "ec_connector_extra_config": {
            "shm_path": str(memory_dir),
            "local_disk": str(tmp_path / "disk"),
            "max_local_cpu_size": 15 * 4096 / 2**30,
            "prefetch_timeout_ms": 60_000,
        },
    }


def half(engine: InProcessLLM) -> Any:
    """The scheduler half of an engine's connector."""
    return engine.llm.llm_engine.engine_core.engine_core.scheduler.ec_connector._scheduler


def wait_until_idle(engine: InProcessLLM) -> None:
    """Wait until nothing is pinned: all is saved and written down, and no lease is left."""
    deadline = time.monotonic() + 10
    while pinned := half(engine).engine.memory.usage().pinned:
        assert time.monotonic() < deadline, f"{pinned} bytes stay pinned"
        time.sleep(0.01)


def files(ec: dict[str, Any]) -> list[Path]:
    disk = Path(ec["ec_connector_extra_config"]["local_disk"])
    return sorted(disk.rglob("*.safetensors"))


def pillow(picture: bytes) -> Image.Image:
    return Image.open(io.BytesIO(picture)).convert("RGB")


def test_damaged_files_are_encoded_again_and_replaced(
    open_engine: OpenEngine, ec: dict[str, Any]
) -> None:
    pictures = [noise_picture(seed) for seed in range(8)]
    with open_engine("qwen2_vl", ec) as engine:
        expected = [engine.generate(TEXT, [picture]) for picture in pictures]
        wait_until_idle(engine)
    gone, cut, empty, flipped, other, longer, header = files(ec)[:7]
    gone.unlink()
    cut.write_bytes(cut.read_bytes()[:-1])
    empty.write_bytes(b"")
    content = bytearray(flipped.read_bytes())
    content[-1] ^= 1
    flipped.write_bytes(content)
    shutil.copyfile(files(ec)[-1], other)
    longer.write_bytes(longer.read_bytes() + b"\0")
    header.write_bytes(b"\xff" * 8 + header.read_bytes()[8:])
    for encoded in (7, 0):
        with open_engine("qwen2_vl", ec) as engine:
            assert [engine.generate(TEXT, [picture]) for picture in pictures] == expected
            assert engine.encoded_items() == encoded
            wait_until_idle(engine)
            corruptions = half(engine).engine.events.value("corruptions", "disk")
            assert corruptions == (6 if encoded else 0)


def test_aborts_and_preemptions_at_any_step_leave_nothing_pinned(
    open_engine: OpenEngine, ec: dict[str, Any]
) -> None:
    from vllm import SamplingParams

    pictures = [noise_picture(seed) for seed in range(8)]
    with open_engine("qwen2_vl", ec) as engine:
        expected = [engine.generate(TEXT, [picture]) for picture in pictures]
        vllm, dice = engine.llm.llm_engine, random.Random(1)
        for turn in range(40):
            if turn % 5 == 0:
                engine.reset_caches()
            names = [f"{turn}-{number}" for number in range(dice.randrange(1, 6))]
            for name in names:
                images = [pillow(picture) for picture in dice.choices(pictures, k=3)]
                prompt = {"prompt": ITEM * 3, "multi_modal_data": {"image": images}}
                vllm.add_request(name, prompt, SamplingParams(max_tokens=5, ignore_eos=True))
            for _ in range(dice.randrange(6)):
                vllm.step()
            if turn % 3 == 0:
                engine.llm.reset_prefix_cache(reset_running_requests=True)
            vllm.abort_request(dice.sample(names, dice.randrange(len(names) + 1)))
            while vllm.has_unfinished_requests():
                vllm.step()
        assert [engine.generate(TEXT, [picture]) for picture in pictures] == expected
        assert not half(engine)._requests
        assert not half(engine)._leased
        wait_until_idle(engine)


def test_a_pooling_model_lets_its_entries_go(open_engine: OpenEngine, ec: dict[str, Any]) -> None:
    """The runner of such a model hands no report of a worker to the scheduler."""
    prompt = {"prompt": ITEM, "multi_modal_data": {"image": pillow(noise_picture(1))}}
    with open_engine("qwen2_vl", ec, runner="pooling") as engine:
        (first,) = engine.llm.embed([prompt], use_tqdm=False)
        wait_until_idle(engine)
        engine.encoded_items()
        engine.reset_caches()
        (second,) = engine.llm.embed([prompt], use_tqdm=False)
        assert engine.encoded_items() == 0
        assert second.outputs.embedding == first.outputs.embedding
        wait_until_idle(engine)


def test_disk_is_read_after_vllm_has_emptied_its_encoder_cache(
    open_engine: OpenEngine, ec: dict[str, Any]
) -> None:
    pictures = [noise_picture(seed) for seed in range(16)]  # more than memory holds
    with open_engine("qwen2_vl", ec) as engine:
        for picture in pictures:
            engine.generate(TEXT, [picture])
        wait_until_idle(engine)
        assert half(engine).engine.flush()
        engine.encoded_items()
        engine.reset_caches()
        engine.generate(TEXT, [pictures[0]])
        assert engine.encoded_items() == 0
        assert half(engine).engine.events.value("hits", "disk") == 1


def test_an_item_without_media_fails_alone_where_nothing_is_cached(
    open_engine: OpenEngine, ec: dict[str, Any]
) -> None:
    """The worker has no memory tier, so nothing loads; clients may still leave the media out."""
    memory = arena_directory(Path(ec["ec_connector_extra_config"]["shm_path"]))
    memory.mkdir(mode=0o700)
    (memory / "index").touch()  # a file where a directory must be
    unknown = {
        "type": "image_embeds",
        "image_embeds": {"image_grid_thw": [1, 4, 4]},
        "uuid": "ab" * 32,
    }
    picture = noise_picture(1)
    with open_engine("qwen2_vl", ec) as engine:
        expected = engine.generate(TEXT, [picture])
        content = [unknown, {"type": "text", "text": TEXT}]
        (answer,) = engine.llm.chat([{"role": "user", "content": content}], use_tqdm=False)
        assert answer.outputs[0].finish_reason == "error"
        assert engine.generate(TEXT, [picture]) == expected
