from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from lmcache_ec.errors import ConfigError
from lmcache_ec.weights import CHUNK_BYTES, config_fingerprint, fingerprint

if TYPE_CHECKING:
    from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
VISION = "visual.blocks.0.attn.qkv.weight"
MERGER = "visual.merger.mlp.0.weight"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path_factory.mktemp("home") / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home / "lmcache-ec"


def write_shard(path: Path, tensors: dict[str, bytes], dtype: str = "U8") -> Path:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, data in tensors.items():
        end = offset + len(data)
        header[name] = {"dtype": dtype, "shape": [len(data)], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))
    return path


def of(directory: Path, load_format: str = "auto", epoch: str = "") -> str:
    return fingerprint(str(directory), commit=None, load_format=load_format, epoch=epoch)


def test_sharding_order_and_place_do_not_matter(tmp_path: Path) -> None:
    tensors = {VISION: b"vision", MERGER: b"merger", "embed.weight": b"embed"}
    write_shard(tmp_path / "one" / "model.safetensors", tensors)
    for index, name in enumerate(sorted(tensors, reverse=True)):
        write_shard(tmp_path / "many" / f"model-{index}-of-3.safetensors", {name: tensors[name]})
    assert of(tmp_path / "one") == of(tmp_path / "many")


@pytest.mark.parametrize(
    "name",
    [
        VISION,
        "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight",
        "vision_model.layers.0.weight",
        "audio_tower.layers.0.fc1.weight",
        "model.visual.layers.3.weight",
        "model.vision_tower.layers.0.weight",
        "multi_modal_projector.linear_1.weight",
        "some.name.of.tomorrow",
    ],
)
def test_every_byte_of_the_encoder_counts(tmp_path: Path, name: str) -> None:
    data = bytes(range(256)) * 64
    write_shard(tmp_path / "a" / "model.safetensors", {name: data})
    write_shard(tmp_path / "b" / "model.safetensors", {name: data[:-1] + b"\0"})
    assert of(tmp_path / "a") != of(tmp_path / "b")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.down_proj.weight",
        "language_model.model.layers.11.self_attn.q_proj.weight",
        "model.language_model.layers.7.mlp.gate_proj.weight",
        "model.text_model.layers.1.input_layernorm.weight",
        "thinker.model.layers.0.mlp.up_proj.weight",
        "layers.0.attention.wq.weight",
        "lm_head.weight",
        "language_model.lm_head.weight",
    ],
)
def test_the_language_model_does_not_count(tmp_path: Path, name: str) -> None:
    write_shard(tmp_path / "a" / "model.safetensors", {VISION: b"vision", name: b"one"})
    write_shard(tmp_path / "b" / "model.safetensors", {VISION: b"vision", name: b"two"})
    assert of(tmp_path / "a") == of(tmp_path / "b")


def test_names_dtypes_and_swaps_count(tmp_path: Path) -> None:
    write_shard(tmp_path / "a" / "m.safetensors", {VISION: b"12", MERGER: b"34"})
    write_shard(tmp_path / "b" / "m.safetensors", {VISION: b"34", MERGER: b"12"})
    write_shard(tmp_path / "c" / "m.safetensors", {VISION: b"12", MERGER: b"34"}, dtype="I8")
    write_shard(tmp_path / "d" / "m.safetensors", {VISION: b"12", f"{MERGER}2": b"34"})
    assert len({of(tmp_path / name) for name in "abcd"}) == 4


def test_a_tensor_of_several_chunks_counts_to_its_last_byte(tmp_path: Path) -> None:
    data = bytearray(CHUNK_BYTES * 2 + 5)
    write_shard(tmp_path / "a" / "m.safetensors", {VISION: bytes(data)})
    data[-1] = 1
    write_shard(tmp_path / "b" / "m.safetensors", {VISION: bytes(data)})
    data[-1], data[CHUNK_BYTES] = 0, 1
    write_shard(tmp_path / "c" / "m.safetensors", {VISION: bytes(data)})
    assert len({of(tmp_path / name) for name in "abc"}) == 3


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "q4.gguf", "audio/model.bin", "modeling_x.py",
             "config.json", "preprocessor_config.json"]
)  # fmt: skip
def test_other_files_count_whole(tmp_path: Path, name: str) -> None:
    write_shard(tmp_path / "model.safetensors", {VISION: b"vision"})
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"1")
    before = of(tmp_path)
    file.write_bytes(b"2")
    assert of(tmp_path) != before


@pytest.mark.parametrize(
    "name", ["README.md", "optimizer.pt", "tokenizer.json", "model.safetensors.index.json",
             "original/consolidated.pth", ".cache/model.bin"]
)  # fmt: skip
def test_files_that_no_encoder_uses_do_not_count(tmp_path: Path, name: str) -> None:
    write_shard(tmp_path / "model.safetensors", {VISION: b"vision"})
    before = of(tmp_path)
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"1")
    assert of(tmp_path) == before


def test_new_weights_of_the_same_size_and_time_under_the_old_path(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "model" / "m.safetensors", {VISION: b"old"})
    before = of(shard.parent)
    times = shard.stat()
    write_shard(shard, {VISION: b"new"})
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert of(shard.parent) != before


def test_the_memo_is_read_and_private(tmp_path: Path, cache: Path) -> None:
    shard = write_shard(tmp_path / "model" / "m.safetensors", {VISION: b"vision"})
    real = of(shard.parent)
    (memo,) = cache.iterdir()
    assert cache.stat().st_mode & 0o777 == 0o700

    # A false digest in the memo shows whether the file itself was read.
    known = json.loads(memo.read_text())
    for entry in known.values():
        entry[-1] = f"{7:032x}"
    memo.write_text(json.dumps(known))
    assert of(shard.parent) == f"xxh3:{7:032x}"
    cache.chmod(0o777)
    assert of(shard.parent) == real


@pytest.mark.parametrize(
    "text", ["", "[]", "null", '{"a"', "\xff", "[" * 100_000, '{"KEY": 1}', '{"KEY": ["x"]}']
)
def test_a_damaged_memo_is_ignored(tmp_path: Path, cache: Path, text: str) -> None:
    shard = write_shard(tmp_path / "model" / "m.safetensors", {VISION: b"vision"})
    real = of(shard.parent)
    (memo,) = cache.iterdir()
    (key,) = json.loads(memo.read_text())
    memo.write_text(text.replace('"KEY"', json.dumps(key)), encoding="latin-1")
    assert of(shard.parent) == real


def test_a_memo_that_cannot_be_written_is_ignored(tmp_path: Path, cache: Path) -> None:
    cache.parent.write_text("a file where the cache directory should be")
    shard = write_shard(tmp_path / "model" / "m.safetensors", {VISION: b"vision"})
    assert of(shard.parent) == of(shard.parent)


def _header(text: bytes, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        b"\xff" * 16,
        (1 << 40).to_bytes(8, "little") + b"{}",
        _header(b"[]"),
        _header(b"{"),
        _header(b"\xff\xff"),
        _header(b'{"v": 1}'),
        _header(b'{"v": {"dtype": "U8", "shape": [1]}}', b"1"),
        _header(b'{"v": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}', b"1"),
        _header(b'{"v": {"dtype": "U8", "shape": [1], "data_offsets": [-1, 0]}}', b"1"),
        _header(b'{"v": {"dtype": "U8", "shape": [1], "data_offsets": [1, 0]}}', b"1"),
        _header(b'{"v": {"dtype": "U8", "shape": [1], "data_offsets": [0.5, 1.5]}}', b"12"),
        _header(b'{"v": {"dtype": "U8", "shape": [1], "data_offsets": ["0", "1"]}}', b"1"),
    ],
)
def test_a_damaged_shard_is_named(tmp_path: Path, content: bytes) -> None:
    shard = tmp_path / "model" / "m.safetensors"
    shard.parent.mkdir()
    shard.write_bytes(content)
    with pytest.raises(ConfigError, match=r"m\.safetensors"):
        of(shard.parent)


def test_a_model_of_the_hub_is_its_commit(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / COMMIT
    write_shard(snapshot / "model.safetensors", {VISION: b"vision"})
    (tmp_path / "link").symlink_to(snapshot)
    named = fingerprint("org/name", commit=COMMIT, load_format="auto", epoch="")
    assert named == of(snapshot) == of(tmp_path / "link") == f"hub:{COMMIT}"


def test_made_up_weights_depend_on_the_configuration_only(tmp_path: Path) -> None:
    write_shard(tmp_path / "m.safetensors", {VISION: b"1"})
    (tmp_path / "config.json").write_text("{}")
    before = of(tmp_path, "dummy")
    assert before == f"dummy:{config_fingerprint(str(tmp_path), commit=None)}"
    write_shard(tmp_path / "m.safetensors", {VISION: b"2"})
    assert of(tmp_path, "dummy") == before
    (tmp_path / "config.json").write_text('{"depth": 2}')
    assert of(tmp_path, "dummy") != before


@pytest.mark.parametrize(
    ("model", "load_format"),
    [
        ("s3://bucket/model", "runai_streamer"),
        ("org/name", "auto"),
        ("DIRECTORY", "auto"),
        ("DIRECTORY", "tensorizer"),
        ("DIRECTORY", "my_loader"),
    ],
)
def test_weights_that_cannot_be_seen_need_an_epoch(
    tmp_path: Path, model: str, load_format: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    model = model.replace("DIRECTORY", str(tmp_path))
    with pytest.raises(ConfigError, match="set the option `epoch`"):
        fingerprint(model, commit=None, load_format=load_format, epoch="")
    given = fingerprint(model, commit=None, load_format=load_format, epoch="v1")
    assert given == "epoch-only"


def test_a_shard_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"m\.safetensors"):
        of(tmp_path)
