"""What names an entry: distinct for distinct inputs and encoders, and safe as a file name."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_ec.errors import InvalidKeyError
from lmcache_ec.key import MAX_MM_HASH_BYTES, CacheEngineKey, ECMetadata, Namespace

METADATA = ECMetadata("m", revision="r", weights="w", quantization="q", output_format="o")
NAMESPACE = Namespace(METADATA, "bfloat16", namespace="n", epoch="e")

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@given(TEXTS, TEXTS)
def test_names_are_equal_only_for_equal_hashes(one: str, other: str) -> None:
    first, second = CacheEngineKey(NAMESPACE, one), CacheEngineKey(NAMESPACE, other)
    assert (first.name == second.name) == (one == other)
    assert re.fullmatch("[0-9a-f]{64}", first.name)


@pytest.mark.parametrize(
    "other",
    [
        replace(NAMESPACE, dtype="float16"),
        replace(NAMESPACE, namespace="e", epoch="n"),
        replace(NAMESPACE, namespace="ne", epoch=""),
        replace(NAMESPACE, epoch=""),
        *(
            replace(NAMESPACE, metadata=replace(METADATA, **{field: "x"}))
            for field in ("model_name", "revision", "weights", "quantization", "output_format")
        ),
    ],
)
def test_every_field_of_the_namespace_separates(other: Namespace) -> None:
    assert CacheEngineKey(other, "h").digest != CacheEngineKey(NAMESPACE, "h").digest


@given(st.tuples(TEXTS, TEXTS, TEXTS), st.tuples(TEXTS, TEXTS, TEXTS))
def test_field_borders_cannot_be_moved(
    one: tuple[str, str, str], other: tuple[str, str, str]
) -> None:
    first, second = (Namespace(ECMetadata(a), b, c) for a, b, c in (one, other))
    assert (first.digest == second.digest) == (one == other)


def test_hash_cannot_reach_into_another_namespace() -> None:
    other = replace(NAMESPACE, epoch="2")
    forged = (other.digest + b"h")[32:].decode()
    assert CacheEngineKey(NAMESPACE, forged).digest != CacheEngineKey(other, "h").digest


def test_fields_of_the_kv_key() -> None:
    key = CacheEngineKey(NAMESPACE, "picture")
    assert (key.model_name, key.world_size, key.worker_id) == ("m", 1, 0)
    assert (key.dtype, key.request_configs) == ("bfloat16", {})
    digest = hashlib.sha256(b"picture").hexdigest()
    assert key.chunk_hash == int(digest[:16], 16)


@pytest.mark.parametrize("mm_hash", ["", "\0", "a\nb", "../../etc", "é" * 2048, "x" * 4096])
def test_any_text_is_a_hash(mm_hash: str) -> None:
    assert len(CacheEngineKey(NAMESPACE, mm_hash).digest) == 32


@pytest.mark.parametrize(
    "mm_hash",
    ["x" * (MAX_MM_HASH_BYTES + 1), "é" * 2049, "x" * 2**20, "\ud800", "a\udfff", b"x", None, 7,
     ["x"]],
)  # fmt: skip
def test_refused_hashes(mm_hash: str) -> None:
    with pytest.raises(InvalidKeyError, match="mm_hash") as caught:
        CacheEngineKey(NAMESPACE, mm_hash)
    assert len(str(caught.value)) < 300
