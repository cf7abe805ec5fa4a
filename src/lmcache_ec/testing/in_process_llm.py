"""A real vLLM engine in the calling process: scheduler, worker and connector, quick to start."""

from __future__ import annotations

import contextlib
import gc
import os
from typing import TYPE_CHECKING, Any

from lmcache_ec.testing import vllm_site
from lmcache_ec.testing.vllm_server import ENGINE_OPTIONS, ENVIRONMENT, chat_messages

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from vllm import LLM


class InProcessLLM:
    """A real engine whose scheduler and worker run in this process; see :func:`in_process_llm`.

    Attributes:
        llm: vLLM's own object.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def generate(
        self,
        text: str,
        images: Sequence[bytes | Path] = (),
        *,
        audios: Sequence[bytes] = (),
        uuids: Sequence[str] | None = None,
        max_tokens: int = 8,
    ) -> list[int]:
        """Exactly ``max_tokens`` greedy tokens; the other arguments as in `chat_messages`."""
        from vllm import SamplingParams

        (result,) = self.llm.chat(
            chat_messages(text, images, audios, uuids),
            SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
            use_tqdm=False,
        )
        return list(result.outputs[0].token_ids)

    def reset_caches(self) -> None:
        """Empty vLLM's own caches of prefixes, preprocessed inputs and encoder outputs."""
        self.llm.reset_prefix_cache()
        self.llm.llm_engine.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()

    def encoded_items(self) -> int:
        """How many inputs the encoder of rank 0 computed since this was last asked."""
        return int(self.llm.collective_rpc("take_encoded_items")[0]["items"])


@contextlib.contextmanager
def in_process_llm(
    model: Path,
    ec: Mapping[str, Any] | None = None,
    *,
    media_directory: Path | None = None,
    **options: object,
) -> Iterator[InProcessLLM]:
    """Run an engine in the calling process, and take it down whole.

    Engines may follow each other in one process, but not overlap. One that failed may hang when
    it is asked again: take a new one.

    Args:
        model: Directory of the model.
        ec: Arguments of vLLM's ``ECTransferConfig``, or None for no connector.
        media_directory: Folder whose pictures requests may name by file URL.
        options: More arguments of ``vllm.LLM``, over those that make it small.
    """
    vllm_site.activate()
    before = dict(os.environ)
    cores = os.sched_getaffinity(0)
    # vLLM looks into a model's class in a child process even here.
    os.environ.update(
        ENVIRONMENT,
        PYTHONPATH=vllm_site.child_pythonpath(),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )
    try:
        from vllm.config import ECTransferConfig
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.distributed.ec_transfer import ensure_ec_transfer_shutdown

        from vllm import LLM

        settings = {**ENGINE_OPTIONS, **options, "model": str(model)}
        if media_directory is not None:
            settings["allowed_local_media_path"] = str(media_directory)
        if ec is not None:
            settings["ec_transfer_config"] = ECTransferConfig(**ec)
        llm = None
        try:
            llm = LLM(**settings)
            llm.collective_rpc("watch_encoder")
            yield InProcessLLM(llm)
        finally:
            if llm is not None:
                llm.llm_engine.engine_core.shutdown()
            del llm
            ensure_ec_transfer_shutdown()
            cleanup_dist_env_and_memory()
            gc.collect()
    finally:
        # vLLM's worker sets variables and binds this process to cores, for all that follows.
        os.environ.clear()
        os.environ.update(before)
        os.sched_setaffinity(0, cores)
