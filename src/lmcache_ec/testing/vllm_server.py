"""Real vLLM for tests and the demo: an API server in its own processes, an engine in this one.

Both run small models on a CPU with the same engine options, so that their answers can be
compared token by token. Whether the encoder ran is counted around the model's own encoder call.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from lmcache_ec.testing import process_group, vllm_site

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from vllm import LLM

MODEL_NAME = "tiny"  # what requests call the served model
_ENGINE_OPTIONS: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 4096,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 32 << 20,
    "worker_extension_cls": "lmcache_ec.testing.encoder_watch.EncoderWatch",
}
# What every process that runs vLLM gets: models come from disk, and nobody is told.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
_RESETS = ("reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache")
_REQUEST_TIMEOUT_S = 120.0
_SHUTDOWN_TIMEOUT_S = 15  # what vLLM gives its engine
_STOP_TIMEOUT_S = 30.0  # what we give vLLM
_LOG_TAIL_LINES = 40


@dataclass(frozen=True)
class Answer:
    """One answer of the model.

    Attributes:
        text: The generated text.
        token_ids: The generated tokens.
        ttft_s: Seconds from sending the request until its first token came.
    """

    text: str
    token_ids: list[int]
    ttft_s: float


class RequestFailedError(RuntimeError):
    """The server answered a request with an error.

    Attributes:
        status: HTTP status; 200 when the answer failed after it had begun.
    """

    def __init__(self, path: str, status: int, body: str) -> None:
        super().__init__(f"{path} answered {status}: {body[:2000]}")
        self.status = status


def chat_messages(
    text: str,
    images: Sequence[bytes | Path] = (),
    audios: Sequence[bytes] = (),
    uuids: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """The messages of one chat request.

    Args:
        text: What the user asks.
        images: Pictures: files as ``bytes`` are sent as base64, a path is sent as a file URL.
        audios: WAV files, sent as base64.
        uuids: One identifier for each picture, then for each audio file; none by default.
    """
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": _image_url(image)}} for image in images
    ]
    parts += [
        {
            "type": "input_audio",
            "input_audio": {"data": base64.b64encode(audio).decode(), "format": "wav"},
        }
        for audio in audios
    ]
    if uuids is not None:
        for part, uuid in zip(parts, uuids, strict=True):
            part["uuid"] = uuid
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


class VLLMServer:
    """A real vLLM API server on 127.0.0.1, as a context manager. Used from one thread.

    Entering it starts the server and returns when it is healthy; leaving it stops the server.
    Whatever happens, no process of it is left.

    Args:
        model: Directory of the model.
        log: File that gets the server's output; appended to.
        ec: ``--ec-transfer-config``, or None for a server without a connector.
        arguments: More command line arguments of the API server.
        environment: More environment variables.
        media_directory: Folder whose pictures requests may name by file URL.
        start_timeout_s: How long the server may take until it is healthy.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        ec: Mapping[str, Any] | None = None,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        media_directory: Path | None = None,
        start_timeout_s: float = 240,
    ) -> None:
        self._log = log
        self._environment = {
            **os.environ,
            **ENVIRONMENT,
            "PYTHONPATH": vllm_site.child_pythonpath(),
            "VLLM_SERVER_DEV_MODE": "1",  # for the reset and observing endpoints
            **(environment or {}),
        }
        self._arguments = ["--model", str(model), "--served-model-name", MODEL_NAME]
        for option, value in _ENGINE_OPTIONS.items():
            self._arguments.append(f"--{option.replace('_', '-')}")
            if value is not True:
                self._arguments.append(str(value))
        # By default vLLM kills its engine at once, before it can put anything away.
        self._arguments += ["--shutdown-timeout", str(_SHUTDOWN_TIMEOUT_S)]
        if media_directory is not None:
            self._arguments += ["--allowed-local-media-path", str(media_directory)]
        if ec is not None:
            self._arguments += ["--ec-transfer-config", json.dumps(ec)]
        self._arguments += arguments
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self.port = 0

    def __enter__(self) -> Self:
        """Start the server and wait until it is healthy.

        Raises:
            RuntimeError: It died or was not healthy in time; the message ends with its log.
        """
        self.port = _free_port()
        # vLLM leaves its sockets behind.
        self._temporary = tempfile.TemporaryDirectory(prefix="lmcache-ec-")
        environment = {**self._environment, "TMPDIR": self._temporary.name}
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), *self._arguments]
        with self._log.open("ab") as log:
            # A session of its own makes a process group, which kill() reaches as a whole.
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_until_healthy()
            self.post("/collective_rpc", {"method": "watch_encoder"})
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of the API server, which is also its process group."""
        return self._running.pid

    @property
    def alive(self) -> bool:
        """Whether the API server's process runs."""
        return self._process is not None and self._process.poll() is None

    def chat(
        self,
        text: str,
        images: Sequence[bytes | Path] = (),
        *,
        audios: Sequence[bytes] = (),
        uuids: Sequence[str] | None = None,
        max_tokens: int = 8,
        **options: object,
    ) -> Answer:
        """Ask for exactly ``max_tokens`` greedy tokens; arguments as in :func:`chat_messages`.

        ``options`` are more fields of the request.

        Raises:
            RequestFailedError: The server refused or failed the request.
            OSError: The connection broke.
        """
        body = {
            "model": MODEL_NAME,
            "messages": chat_messages(text, images, audios, uuids),
            "temperature": 0,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            **options,
        }
        answer, token_ids, ttft_s = "", list[int](), 0.0
        began = time.perf_counter()
        with self._exchange("POST", "/v1/chat/completions", body) as response:
            for event in _stream_events(response):
                for choice in event["choices"]:
                    token_ids += choice.get("token_ids") or []
                    answer += choice["delta"].get("content") or ""
                if token_ids and not ttft_s:
                    ttft_s = time.perf_counter() - began
        return Answer(answer, token_ids, ttft_s)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """POST a JSON body; returns the JSON answer, empty when the body is.

        Raises:
            RequestFailedError: The status is not 200.
        """
        with self._exchange("POST", path, body) as response:
            answer = response.read()
        return dict(json.loads(answer)) if answer else {}

    def reset_caches(self) -> None:
        """Empty vLLM's own caches of prefixes, preprocessed inputs and encoder outputs."""
        for reset in _RESETS:
            self.post(f"/{reset}")

    def encoded_items(self) -> int:
        """How many inputs the encoder of rank 0 computed since this was last asked."""
        answer = self.post("/collective_rpc", {"method": "take_encoded_items"})
        return int(answer["results"][0]["items"])

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples on ``/metrics`` that carry these labels, 0 if there is none."""
        from prometheus_client.parser import text_string_to_metric_families

        with self._exchange("GET", "/metrics", None) as response:
            text = response.read().decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def log_text(self) -> str:
        """All that the server has printed so far."""
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        """Ask the server to end, as a service manager does; kill what is left. Idempotent."""
        if self._process is None:
            return
        shared_memory = process_group.shared_memory(self._process.pid)
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_TIMEOUT_S)
        self._end(shared_memory)

    def kill(self) -> None:
        """SIGKILL every process of the server at once and wait until all are gone. Idempotent."""
        if self._process is not None:
            self._end(process_group.shared_memory(self._process.pid))

    def _end(self, shared_memory: set[Path]) -> None:
        """Kill what runs, then unlink the shared memory of vLLM's own, which it may leave behind.

        The cache's own lies in a directory and is left as it is.
        """
        process_group.kill(self._running.pid)
        self._running.wait()
        for file in shared_memory:
            file.unlink(missing_ok=True)
        if self._temporary is not None:
            self._temporary.cleanup()
        self._process = None

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the server is not running; enter it first")
        return self._process

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        while True:
            if self._running.poll() is not None:
                raise RuntimeError(f"vLLM died at start:\n{self._log_tail()}")
            with (
                contextlib.suppress(OSError, RequestFailedError),
                self._exchange("GET", "/health", None),
            ):
                return
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"vLLM was not healthy within {self._start_timeout_s} s:\n{self._log_tail()}"
                )
            time.sleep(0.2)

    def _log_tail(self) -> str:
        lines = self.log_text().splitlines()[-_LOG_TAIL_LINES:]
        return "\n".join([*lines, f"(the end of {self._log})"])

    @contextlib.contextmanager
    def _exchange(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> Iterator[http.client.HTTPResponse]:
        """One request on a connection of its own; the response has status 200."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_REQUEST_TIMEOUT_S)
        with contextlib.closing(connection):
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise RequestFailedError(path, response.status, response.read().decode())
            yield response


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

        settings = {**_ENGINE_OPTIONS, **options, "model": str(model)}
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


def _image_url(image: bytes | Path) -> str:
    if isinstance(image, Path):
        return image.resolve().as_uri()
    return "data:image;base64," + base64.b64encode(image).decode()


def _stream_events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON events of a streamed answer, up to its end mark."""
    for line in response:
        if not line.startswith(b"data: "):
            continue
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            return
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            raise RequestFailedError("the stream", response.status, data.decode())
        yield event
    raise RequestFailedError("the stream", response.status, "it ended without its end mark")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
