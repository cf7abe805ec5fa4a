from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lmcache_ec.errors import ConfigError
from lmcache_ec.vllm.identity import (
    encoder_dtype,
    is_content_addressed,
    metadata_from_vllm,
    missing_hooks,
    refuse_unsupported,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lmcache_ec.key import ECMetadata

    ModelDir = Callable[[str], Path]

# torch and vLLM use deprecated parts of torch.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

BLAKE3 = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def engine_config(model: Path, **options: object) -> Any:
    from vllm import EngineArgs

    given = {"enforce_eager": True, "max_model_len": 512, "kv_cache_memory_bytes": 32 << 20}
    return EngineArgs(model=str(model), **(given | options)).create_engine_config()


def identity(model: Path, **options: object) -> ECMetadata:
    return metadata_from_vllm(engine_config(model, **options), epoch="")


def connector(role: str) -> Any:
    from vllm.config import ECTransferConfig

    return ECTransferConfig(ec_connector="ECExampleConnector", ec_role=role)


def test_what_changes_the_output_changes_the_identity(model_dir: ModelDir) -> None:
    model = model_dir("qwen2_vl")
    changed: list[dict[str, object]] = [
        {},
        {"mm_processor_kwargs": {"max_pixels": 3136}},
        {"mm_processor_kwargs": {"images_kwargs": {"max_pixels": 3136}}},
        {"media_io_kwargs": {"video": {"num_frames": 4}}},
        {"video_pruning_rate": 0.5},
        {"hf_overrides": {"vision_config": {"spatial_merge_size": 1}}},
        {"load_format": "dummy"},
    ]
    assert len({identity(model, **options) for options in changed}) == len(changed)


def test_what_does_not_change_the_output_keeps_the_identity(model_dir: ModelDir) -> None:
    model = model_dir("qwen2_vl")
    plain = identity(model)
    same: list[dict[str, object]] = [
        {"mm_processor_kwargs": {"device": "cpu"}},
        {"media_io_kwargs": {"video": {}}},
        {"max_num_seqs": 2, "enable_prefix_caching": False, "limit_mm_per_prompt": {"image": 1}},
        {"seed": 7, "mm_encoder_tp_mode": "data"},
        {"ec_transfer_config": connector("ec_producer")},
        {"ec_transfer_config": connector("ec_consumer")},
    ]
    for options in same:
        assert identity(model, **options) == plain, options


def test_new_weights_under_the_old_path(model_dir: ModelDir) -> None:
    model = model_dir("qwen2_vl")
    config = engine_config(model)
    before = metadata_from_vllm(config, epoch="")
    shard = model / "model.safetensors"
    content = shard.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    changed = bytearray(content)
    changed[8 + length + header["visual.patch_embed.proj.weight"]["data_offsets"][0]] ^= 1
    shard.write_bytes(changed)
    try:
        assert metadata_from_vllm(config, epoch="").weights != before.weights
    finally:
        shard.write_bytes(content)
    assert metadata_from_vllm(config, epoch="") == before


def test_every_process_finds_the_same_identity(model_dir: ModelDir) -> None:
    config = engine_config(model_dir("qwen2_vl"), mm_processor_kwargs={"max_pixels": 3136})
    script = (
        "import pickle, sys; config = pickle.load(sys.stdin.buffer)\n"
        "from lmcache_ec.vllm.identity import metadata_from_vllm\n"
        "sys.stdout.buffer.write(b'IDENTITY' + pickle.dumps(metadata_from_vllm(config, '')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=pickle.dumps(config),
        env=os.environ | {"PYTHONHASHSEED": "7"},
        stdout=subprocess.PIPE,
        check=True,
    )
    other = pickle.loads(done.stdout.split(b"IDENTITY")[1])
    assert other == metadata_from_vllm(config, epoch="")


def test_what_vllm_does_to_the_config_while_it_loads_keeps_the_identity(
    model_dir: ModelDir,
) -> None:
    config = engine_config(model_dir("qwen2_vl"))
    before = metadata_from_vllm(config, epoch="")
    config.model_config.hf_config.tie_word_embeddings = True
    assert metadata_from_vllm(config, epoch="") == before


def test_an_override_without_a_name_needs_an_epoch(model_dir: ModelDir) -> None:
    def override(config: object) -> object:
        return config

    config = engine_config(model_dir("qwen2_vl"), hf_overrides=override)
    with pytest.raises(ConfigError, match=r"hf_overrides.*override.*epoch"):
        metadata_from_vllm(config, epoch="")
    assert metadata_from_vllm(config, epoch="v1").weights.startswith("xxh3:")


def test_an_encoder_from_a_second_repository_needs_an_epoch(model_dir: ModelDir) -> None:
    config = engine_config(model_dir("qwen2_vl"), hf_overrides={"audio_model_id": "org/whisper"})
    with pytest.raises(ConfigError, match=r"org/whisper.*epoch"):
        metadata_from_vllm(config, epoch="")
    assert metadata_from_vllm(config, epoch="v1").weights.startswith("xxh3:")


def test_an_option_without_a_text_is_named(model_dir: ModelDir) -> None:
    config = engine_config(model_dir("qwen2_vl"), mm_processor_kwargs={"filter": object()})
    with pytest.raises(ConfigError, match=r"mm_processor_kwargs\.filter.*object"):
        metadata_from_vllm(config, epoch="")


def test_the_dtype_is_the_models(model_dir: ModelDir) -> None:
    config = engine_config(model_dir("qwen2_vl"), dtype="float32")
    assert encoder_dtype(config) is torch.float32


def test_only_digests_are_content_addressed() -> None:
    from vllm.multimodal.hasher import MultiModalHasher

    for algorithm in ("blake3", "sha256", "sha512"):
        assert is_content_addressed(MultiModalHasher.hash_kwargs(algorithm, image=b"pixels"))
    for name in (
        "",
        "my-id",
        "renderer0-mm-1-image-0",
        f"lora:{BLAKE3}",
        BLAKE3.upper(),
        f"{BLAKE3}\n",
        BLAKE3[:-1],
        f"{BLAKE3}0",
        "../../etc/passwd",
        "٣" * 64,
    ):
        assert not is_content_addressed(name), name


def test_unsupported_models_are_refused(model_dir: ModelDir) -> None:
    refuse_unsupported(engine_config(model_dir("qwen2_vl")))
    with pytest.raises(ConfigError, match=r"Whisper.*encoder-decoder.*--ec-transfer-config"):
        refuse_unsupported(engine_config(model_dir("whisper"), max_model_len=64))


def test_a_model_without_an_encoder_is_refused(model_dir: ModelDir, tmp_path: Path) -> None:
    config = json.loads((model_dir("qwen2_vl") / "config.json").read_text())["text_config"]
    text = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    (tmp_path / "config.json").write_text(json.dumps(config | text))
    with pytest.raises(ConfigError, match=r"not multimodal"):
        refuse_unsupported(engine_config(tmp_path, skip_tokenizer_init=True))


def test_a_vllm_without_the_hooks_is_refused() -> None:
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase

    class Before032:
        def ensure_cache_available(self) -> None: ...

    assert missing_hooks(ECConnectorBase) == []
    assert missing_hooks(Before032) == ["take_unavailable_requests", "update_state_after_free"]


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({"mm_processor_cache_gb": 0, "enable_prefix_caching": False}, True),
        ({"mm_processor_cache_gb": 0, "enable_prefix_caching": True}, False),
        ({"enable_prefix_caching": False}, False),
    ],
)
def test_identifiers_that_never_repeat_are_warned_of(
    model_dir: ModelDir,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, object],
    warned: bool,
) -> None:
    with caplog.at_level(logging.WARNING, logger="lmcache_ec"):
        refuse_unsupported(engine_config(model_dir("qwen2_vl"), **options))
    assert ("will never hit" in caplog.text) is warned
