"""What makes two vLLM servers compute the same encoder outputs, and what makes them differ.

vLLM's identifier covers the name of the model, the media and the request's own options. The rest
is here. All of it is read from what the server was started with, never from the configuration
objects that vLLM changes while it loads a model: workers and scheduler ask at different moments,
and must agree.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lmcache_ec.errors import ConfigError
from lmcache_ec.key import ECMetadata
from lmcache_ec.weights import EPOCH_REMEDY, config_fingerprint, fingerprint

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = logging.getLogger(__name__)

OLDEST_VLLM = "0.32"
_NEEDED_HOOKS = (
    "ensure_cache_available",
    "take_unavailable_requests",
    "update_state_after_free",
)
_DIGEST = re.compile("[0-9a-f]{64}|[0-9a-f]{128}")  # blake3 or sha256; sha512
_COUNTER = re.compile(r"renderer\d+-mm-\d+-.*", re.DOTALL)


def metadata_from_vllm(vllm_config: VllmConfig, epoch: str) -> ECMetadata:
    """Identify the encoder of a server. May read its weights from disk, once per host.

    Args:
        vllm_config: The configuration of a multimodal model.
        epoch: The operator's own version of the weights, or "" to identify them by content.

    Returns:
        The same in every process and on every host that computes the same encoder outputs.

    Raises:
        ConfigError: The model cannot be told from a newer one and ``epoch`` is not set, or an
            option has a value without a canonical text.
    """
    model = vllm_config.model_config
    # Ultravox is the one model whose encoder may come from a second repository, at no fixed commit.
    if (encoder := getattr(model.hf_config, "audio_model_id", None)) and not epoch:
        raise ConfigError(
            f"model {model.model!r} takes its encoder from {encoder!r}, at whatever commit is "
            f"newest; {EPOCH_REMEDY}"
        )
    commit = _commit(model.revision)
    name = model.model_weights or model.model
    return ECMetadata(
        model_name=name,
        # "main" and the commit it stands for are the same revision.
        revision=commit or str(model.revision or ""),
        weights=fingerprint(
            name, commit=commit, load_format=str(vllm_config.load_config.load_format), epoch=epoch
        ),
        quantization=str(model.quantization or ""),
        output_format=_output_format(vllm_config, epoch),
    )


def encoder_dtype(vllm_config: VllmConfig) -> torch.dtype:
    """The dtype of encoder outputs, which is the model's; never the KV cache's."""
    dtype = vllm_config.model_config.dtype
    assert isinstance(dtype, torch.dtype), dtype
    return dtype


def is_content_addressed(identifier: str) -> bool:
    """Whether an identifier has the form of the digests that vLLM makes from media.

    False for vLLM's per-process counters, for LoRA identifiers and for a client's plain uuid. A
    uuid that has this form itself, or that vLLM digested together with the request's options,
    cannot be told from a digest of the media: vLLM hands connectors nothing else to go by.
    """
    return _DIGEST.fullmatch(identifier) is not None


def is_counter(identifier: str) -> bool:
    """Whether an identifier is one that vLLM counts up in each process, when it hashes nothing."""
    return _COUNTER.fullmatch(identifier) is not None


def refuse_unsupported(vllm_config: VllmConfig) -> None:
    """Stop a server that the cache could only harm; warn about one that it cannot help.

    Raises:
        ConfigError: vLLM is too old, or the model is not multimodal or is an encoder-decoder.
    """
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase

    import vllm

    model = vllm_config.model_config
    if missing := missing_hooks(ECConnectorBase):
        raise ConfigError(
            f"vLLM {vllm.__version__} has no ECConnectorBase.{missing[0]}; the encoder cache "
            f"needs vLLM {OLDEST_VLLM} or newer: upgrade vLLM, or remove --ec-transfer-config"
        )
    # First: a few of these count as multimodal as well.
    if model.is_encoder_decoder:
        raise ConfigError(
            f"model {model.model!r} ({model.architecture}) is an encoder-decoder: vLLM saves the "
            "encoder outputs of such a model but never loads them, so a hit would give wrong "
            "tokens; remove --ec-transfer-config"
        )
    if not model.is_multimodal_model:
        raise ConfigError(
            f"model {model.model!r} ({model.architecture}) is not multimodal, so it has no encoder "
            "outputs to cache; remove --ec-transfer-config"
        )
    if (
        model.multimodal_config.mm_processor_cache_gb == 0
        and not vllm_config.cache_config.enable_prefix_caching
    ):
        logger.warning(
            "The encoder cache will never hit: with --mm-processor-cache-gb 0 and prefix caching "
            "off, vLLM numbers media items instead of hashing them. Turn one of the two on."
        )


def missing_hooks(base: type) -> list[str]:
    """Those of the needed methods that a version of ``ECConnectorBase`` lacks, sorted."""
    return [name for name in _NEEDED_HOOKS if not hasattr(base, name)]


def _output_format(vllm_config: VllmConfig, epoch: str) -> str:
    """Canonical JSON of what changes encoder outputs besides the model's own files.

    Left out on purpose: what changes rounding only (device, attention backend, how ranks share
    the encoder) and limits on what a request may hold. Prefill and encode servers of one
    deployment differ in these and must share entries.
    """
    import transformers

    import vllm

    model = vllm_config.model_config
    multimodal = model.multimodal_config
    parts: dict[str, object] = {
        "vllm": ".".join(str(part) for part in vllm.__version_tuple__[:3]),
        "transformers": transformers.__version__,  # its processors prepare the encoder's input
        "architecture": model.architecture,
        "code_revision": model.code_revision,
        "model_class_overrides": model.model_class_overrides,
        "hf_overrides": _hf_overrides(model, epoch),
        "hf_config": _foreign_config(model, epoch),
        "quantization_config": model.quantization_config,
        "mm_processor_kwargs": _without_device(multimodal.mm_processor_kwargs or {}),
        "media_io_kwargs": _media_io(vllm_config),
        "video_pruning": (
            [multimodal.video_pruning_method, multimodal.video_pruning_rate]
            if multimodal.video_pruning_rate
            else None
        ),
        "attention_dtype": multimodal.mm_encoder_attn_dtype,
        "attention_scales": (
            hashlib.sha256(Path(multimodal.mm_encoder_fp8_scale_path).read_bytes()).hexdigest()
            if multimodal.mm_encoder_fp8_scale_path
            else None
        ),
        # Made-up weights are drawn shard by shard.
        "dummy_shards": (
            [
                vllm_config.parallel_config.tensor_parallel_size,
                multimodal.mm_encoder_tp_mode,
            ]
            if vllm_config.load_config.load_format == "dummy"
            else None
        ),
    }
    used = {name: value for name, value in parts.items() if value}
    return json.dumps(_plain(used, "vLLM"), sort_keys=True, separators=(",", ":"))


def _commit(revision: object) -> str | None:
    """Commit that the hub resolved a revision to; None if it did not."""
    resolved = getattr(revision, "resolved", None)
    if resolved is None and re.fullmatch("[0-9a-f]{40}", str(revision)):
        return str(revision)
    return resolved


def _hf_overrides(model: ModelConfig, epoch: str) -> object:
    overrides = model.hf_overrides
    if not callable(overrides):
        return overrides
    name = f"{overrides.__module__}.{overrides.__qualname__}"
    if not epoch:
        raise ConfigError(
            f"hf_overrides is the function {name}, whose effect has no name; pass a dict, or "
            f"{EPOCH_REMEDY} or the function"
        )
    return name


def _foreign_config(model: ModelConfig, epoch: str) -> str | None:
    """Fingerprint of ``--hf-config-path``, if the configuration is not the model's own."""
    if not model.hf_config_path or model.hf_config_path == model.model:
        return None
    commit = _commit(getattr(model, "_hf_config_revision", None))
    try:
        return config_fingerprint(model.hf_config_path, commit=commit)
    except ConfigError:
        if not epoch:
            raise
        return None


def _without_device(options: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in options.items() if name != "device"}


def _media_io(vllm_config: VllmConfig) -> dict[str, object]:
    """How media are decoded. The API server hashes this into identifiers, ``LLM.chat`` does not."""
    options = vllm_config.model_config.multimodal_config.media_io_kwargs
    found: dict[str, object] = {}
    for modality, given in options.items():
        kept = _without_device(given)
        # vLLM picks this pair by itself on an encode-only server, so its consumers lack it.
        if vllm_config.ec_transfer_config is not None and (
            vllm_config.ec_transfer_config.is_encode_only
            and given.get("backend") == "torchcodec"
            and "device" in given
        ):
            del kept["backend"]
        if kept:
            found[modality] = kept
    return found


def _plain(value: object, where: str) -> object:
    """The value as JSON knows it, the same in every process.

    Raises:
        ConfigError: It holds an object of another type, of which only an address would be left.
    """
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(item, f"{where}.{name}") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(item, where) for item in value), key=json.dumps)
    if isinstance(value, torch.dtype | Path):
        return str(value)
    if is_dataclass(value):
        named = {field.name: getattr(value, field.name) for field in fields(value)}
        return _plain(named, where)
    raise ConfigError(
        f"{where} holds {value!r} of type {type(value).__name__}, which has no canonical text; "
        "write it as numbers, text, lists and maps"
    )
