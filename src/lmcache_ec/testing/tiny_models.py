"""Random-weight multimodal models, small enough to build in a second and to serve on a CPU.

Each is a complete model directory (weights, processor, tokenizer, chat template) that vLLM loads
like any other. The weights are seeded, so two directories of one name hold the same model, and
larger than a trained model's first weights, so that another picture gives another answer.

    python -m lmcache_ec.testing.tiny_models qwen2_vl /tmp/qwen2_vl

Needs transformers; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lmcache_ec.testing import vllm_site

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from transformers import PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin

# vLLM puts the placeholders of the media before the text, so a template need not know them.
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
# Rotary sections sum to half of a head (32, the least that vLLM's CPU attention takes).
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
_QWEN_NAMED = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
_QWEN_TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}


def make_tiny_model(name: str, directory: str | Path) -> Path:
    """Build one model in ``directory``, which is made if needed.

    Args:
        name: One of ``TINY_MODELS``.
        directory: Where the model's files go; files of the same names are overwritten.

    Returns:
        ``directory`` as a path.

    Raises:
        ValueError: There is no model of this name.
    """
    if name not in TINY_MODELS:
        raise ValueError(f"no tiny model {name!r}; choose one of {', '.join(sorted(TINY_MODELS))}")
    # Read by transformers when it is imported: a processor without a file must not ask the hub.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    vllm_site.activate()
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        TINY_MODELS[name](target)
    return target


def _tokenizer(specials: list[str], named: Mapping[str, object]) -> PreTrainedTokenizerFast:
    """A tokenizer of the 256 bytes after ``specials``; ``named`` says what each of them is for."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = specials + sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    core.add_special_tokens(specials)
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, model_max_length=8192, chat_template=_CHAT_TEMPLATE, **named
    )


def _save(model: PreTrainedModel, processor: ProcessorMixin, target: Path) -> None:
    """Write ``model`` with lively weights, in bfloat16, and its processor.

    A matrix whose rows have length n gets weights of deviation 1.6 / sqrt(n): each layer then
    changes its input, which transformers' default of 0.02 does not do at these widths.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 1.6 / math.sqrt(math.prod(weight.shape[1:])))
    model.to(torch.bfloat16).save_pretrained(target)
    processor.save_pretrained(target)


def _qwen_tokenizer() -> tuple[PreTrainedTokenizerFast, dict[str, int]]:
    """Tokenizer of the Qwen vision models, and the ids that their configurations name."""
    tokenizer = _tokenizer(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *_QWEN_TOKENS.values()],
        _QWEN_NAMED,
    )
    return tokenizer, {k: tokenizer.convert_tokens_to_ids(v) for k, v in _QWEN_TOKENS.items()}


def _qwen2_vl(
    target: Path, *, depth: int = 2, width: int = 64, heads: int = 2, max_pixels: int = 112 * 112
) -> None:
    from transformers import (
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        Qwen2VLImageProcessorPil,
        Qwen2VLProcessor,
        Qwen2VLVideoProcessor,
    )

    tokenizer, ids = _qwen_tokenizer()
    config = Qwen2VLConfig(
        text_config={
            **_TEXT,
            "vocab_size": len(tokenizer),
            "rope_parameters": _MROPE,
            "bos_token_id": ids["vision_start_token_id"],
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={
            "depth": depth,
            "embed_dim": width,
            "num_heads": heads,
            "mlp_ratio": 2,
            "hidden_size": _TEXT["hidden_size"],
        },
        tie_word_embeddings=False,
        **ids,
    )
    pixels = {"min_pixels": 28 * 28, "max_pixels": max_pixels}
    processor = Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessorPil(**pixels),
        video_processor=Qwen2VLVideoProcessor(**pixels),
        tokenizer=tokenizer,
    )
    _save(Qwen2VLForConditionalGeneration(config), processor, target)


def _demo(target: Path) -> None:
    """Qwen2-VL whose encoder takes two CPU cores about a second for one picture."""
    _qwen2_vl(target, depth=16, width=512, heads=8, max_pixels=560 * 560)


def _qwen3_vl(target: Path) -> None:
    """Qwen3-VL: with DeepStack, its encoder's output is three times as wide as the text model."""
    from transformers import (
        Qwen2VLImageProcessorPil,
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    tokenizer, ids = _qwen_tokenizer()
    config = Qwen3VLConfig(
        text_config={
            **_TEXT,
            "vocab_size": len(tokenizer),
            "head_dim": 32,
            "rope_parameters": {**_MROPE, "mrope_interleaved": True},
        },
        vision_config={
            "depth": 3,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": _TEXT["hidden_size"],
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        tie_word_embeddings=False,
        **ids,
    )
    pixels = {
        "patch_size": 16,
        "size": {"shortest_edge": 32 * 32, "longest_edge": 128 * 128},  # both are areas
    }
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessorPil(**pixels),
        video_processor=Qwen3VLVideoProcessor(**pixels),
        tokenizer=tokenizer,
    )
    _save(Qwen3VLForConditionalGeneration(config), processor, target)


def _idefics3(target: Path) -> None:
    """Idefics3: one picture becomes several tiles, one item of several encoder inputs."""
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
        LlamaConfig,
    )

    named = {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
    }
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    tokenizer = _tokenizer(
        ["<unk>", "<s>", "</s>", "<pad>", *named.values(), *tiles],
        {
            "unk_token": "<unk>",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "extra_special_tokens": named,
        },
    )
    config = Idefics3Config(
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        scale_factor=2,
        tie_word_embeddings=False,
        text_config=LlamaConfig(
            **_TEXT, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id
        ),
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 14,
        },
    )
    processor = Idefics3Processor(
        image_processor=Idefics3ImageProcessorPil(
            size={"longest_edge": 112}, max_image_size={"longest_edge": 56}
        ),
        tokenizer=tokenizer,
        image_seq_len=4,  # (56 / 14 / scale_factor) squared
    )
    _save(Idefics3ForConditionalGeneration(config), processor, target)


def _qwen2_audio(target: Path) -> None:
    from transformers import (
        Qwen2AudioConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        WhisperFeatureExtractor,
    )

    tokenizer = _tokenizer(
        [
            "<|endoftext|>",
            "<|im_start|>",
            "<|im_end|>",
            "<|audio_bos|>",
            "<|audio_eos|>",
            "<|AUDIO|>",
        ],
        _QWEN_NAMED,
    )
    config = Qwen2AudioConfig(
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
        text_config={
            **_TEXT,
            "model_type": "qwen2",
            "vocab_size": len(tokenizer),
            "tie_word_embeddings": False,
        },
        audio_config={
            "d_model": 64,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 128,
            "num_mel_bins": 16,
            "max_source_positions": 1500,
        },
    )
    processor = Qwen2AudioProcessor(
        feature_extractor=WhisperFeatureExtractor(feature_size=16, sampling_rate=16000),
        tokenizer=tokenizer,
        chat_template=_CHAT_TEMPLATE,
    )
    _save(Qwen2AudioForConditionalGeneration(config), processor, target)
    _rename_weights(target, "language_model.model.model.", "language_model.model.")


def _rename_weights(target: Path, old: str, new: str) -> None:
    """Give weights that start with ``old`` the older prefix that vLLM's loader knows."""
    from safetensors.torch import load_file, save_file

    file = target / "model.safetensors"
    weights = load_file(file)
    renamed = {
        new + name.removeprefix(old) if name.startswith(old) else name: weight
        for name, weight in weights.items()
    }
    save_file(renamed, file, metadata={"format": "pt"})


def _whisper(target: Path) -> None:
    """Whisper: an encoder-decoder model, which an encoder cache must refuse."""
    from transformers import (
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperProcessor,
        WhisperTokenizerFast,
    )

    end = "<|endoftext|>"
    specials = [
        *(end, "<|startoftranscript|>", "<|en|>", "<|translate|>", "<|transcribe|>"),
        *("<|startofprev|>", "<|notimestamps|>"),
    ]
    roles = ("eos_token", "bos_token", "unk_token", "pad_token")
    core = _tokenizer(specials, dict.fromkeys(roles, end))
    tokenizer = WhisperTokenizerFast(tokenizer_object=core.backend_tokenizer)
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        num_mel_bins=16,
        d_model=64,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=1500,
        max_target_positions=512,
        decoder_start_token_id=specials.index("<|startoftranscript|>"),
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        begin_suppress_tokens=None,
    )
    processor = WhisperProcessor(
        feature_extractor=WhisperFeatureExtractor(feature_size=16), tokenizer=tokenizer
    )
    _save(WhisperForConditionalGeneration(config), processor, target)


TINY_MODELS: dict[str, Callable[[Path], None]] = {
    "demo": _demo,
    "idefics3": _idefics3,
    "qwen2_audio": _qwen2_audio,
    "qwen2_vl": _qwen2_vl,
    "qwen3_vl": _qwen3_vl,
    "whisper": _whisper,
}
"""What builds each model. All but "demo" (70 MB) take about 1 MB on disk."""


def main() -> None:
    """Build the model that the command line names."""
    parser = argparse.ArgumentParser(description="Build a small random-weight model.")
    parser.add_argument("name", choices=sorted(TINY_MODELS))
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    make_tiny_model(arguments.name, arguments.directory)


if __name__ == "__main__":
    main()
