"""Real API servers: restarts, crashes, several servers, tensor parallelism, hostile requests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lmcache_ec.testing.media import noise_picture
from lmcache_ec.testing.vllm_server import RequestFailedError, VLLMServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.vllm.conftest import Reference, StartServer

TEXT = "What is this?"
PICTURE = noise_picture(1)


@pytest.fixture
def shm() -> Iterator[Path]:
    """A place for arenas, which must be empty once the servers have stopped."""
    directory = Path(tempfile.mkdtemp(prefix="lmcache-ec-test-", dir="/dev/shm"))
    yield directory
    left = [path.name for path in directory.iterdir()]
    shutil.rmtree(directory)
    assert left == []


def connector(shm: Path, disk: Path | None = None, **extra: Any) -> dict[str, Any]:
    settings = {"shm_path": str(shm), "max_local_cpu_size": 0.05, **extra}
    if disk is not None:
        settings["local_disk"] = str(disk)
    # The servers run on a busy machine: time-outs are for other tests.
    settings.setdefault("prefetch_timeout_ms", 60_000)
    return {
        "ec_connector": "LMCacheECConnector",
        "ec_role": "ec_both",
        "ec_connector_extra_config": settings,
    }


def wait_for_files(disk: Path, count: int) -> None:
    deadline = time.monotonic() + 30
    while len(list(disk.rglob("*.safetensors"))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def hits(server: VLLMServer, tier: str) -> float:
    return server.metric("vllm:lmcache_ec_hits_total", tier=tier)


def test_restarts_crashes_and_a_second_server(
    reference: Reference, start_server: StartServer, shm: Path, tmp_path: Path
) -> None:
    """One image is encoded once in the life of a storage directory."""
    expected = reference("qwen2_vl", TEXT, [PICTURE])
    disk = tmp_path / "disk"

    first = start_server("qwen2_vl", ec=connector(shm, disk))
    assert first.chat(TEXT, [PICTURE]).token_ids == expected
    assert first.encoded_items() == 1
    wait_for_files(disk, 1)
    first.reset_caches()
    assert first.chat(TEXT, [PICTURE]).token_ids == expected
    assert (first.encoded_items(), hits(first, "memory")) == (0, 1)

    # Another server of the host, while the first runs: the same memory tier.
    second = start_server("qwen2_vl", ec=connector(shm, disk))
    assert second.chat(TEXT, [PICTURE]).token_ids == expected
    assert (second.encoded_items(), hits(second, "memory")) == (0, 1)

    # Crashed, both of them: the next one takes the memory tier over, warm.
    first.kill()
    second.kill()
    third = start_server("qwen2_vl", ec=connector(shm, disk))
    assert third.chat(TEXT, [PICTURE]).token_ids == expected
    assert (third.encoded_items(), hits(third, "memory")) == (0, 1)

    # Stopped: the memory is given back, and the next one reads the disk.
    third.stop()
    assert list(shm.iterdir()) == []
    # This one gives it back as well, though vLLM's default kills its engine at once.
    fourth = start_server(
        "qwen2_vl", ec=connector(shm, disk), arguments=["--shutdown-timeout", "0"]
    )
    assert fourth.chat(TEXT, [PICTURE]).token_ids == expected
    assert (fourth.encoded_items(), hits(fourth, "disk")) == (0, 1)
    fourth.stop()


def test_two_servers_share_one_directory_as_two_hosts_would(
    reference: Reference, start_server: StartServer, shm: Path, tmp_path: Path
) -> None:
    expected = reference("qwen2_vl", TEXT, [PICTURE])
    disk = tmp_path / "disk"
    with ExitStack() as cleanup:
        hosts = []
        for name in ("one", "two"):
            (shm / name).mkdir()
            cleanup.callback((shm / name).rmdir)
            hosts.append(start_server("qwen2_vl", ec=connector(shm / name, disk)))
        one, two = hosts
        assert one.chat(TEXT, [PICTURE]).token_ids == expected
        wait_for_files(disk, 1)
        assert two.chat(TEXT, [PICTURE]).token_ids == expected
        assert (two.encoded_items(), hits(two, "disk"), hits(two, "memory")) == (0, 1, 0)
        one.stop()
        two.stop()


def test_tensor_parallel_workers_all_load_and_one_saves(
    start_server: StartServer, shm: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "arguments": ["--tensor-parallel-size", "2"],
        "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    }
    plain = start_server("qwen2_vl", **options)
    expected = plain.chat(TEXT, [PICTURE]).token_ids
    plain.stop()
    disk = tmp_path / "disk"
    server = start_server("qwen2_vl", ec=connector(shm, disk), **options)
    assert server.chat(TEXT, [PICTURE]).token_ids == expected
    assert server.encoded_items() >= 1
    wait_for_files(disk, 1)
    for _ in range(2):
        server.reset_caches()
        assert server.chat(TEXT, [PICTURE]).token_ids == expected
        assert server.encoded_items() == 0
    assert hits(server, "memory") == 2
    assert server.metric("vllm:lmcache_ec_bytes_written_total", tier="disk") > 0
    assert len(list(disk.rglob("*.safetensors"))) == 1
    server.stop()


def test_hostile_requests_harm_themselves_alone(
    reference: Reference, start_server: StartServer, shm: Path, tmp_path: Path
) -> None:
    expected = reference("qwen2_vl", TEXT, [PICTURE])
    disk = tmp_path / "disk"
    server = start_server("qwen2_vl", ec=connector(shm, disk, prefetch_timeout_ms=2000))
    for uuid in ("", "a\nb", "a\0b", "../../../escape", str(tmp_path / "absolute"), "x" * 5000):
        assert server.chat(TEXT, [PICTURE], uuids=[uuid]).token_ids == expected
        server.reset_caches()
    assert not disk.exists()
    # Metadata without media, for an item that nobody has: vLLM alone would die of it.
    unknown = {
        "type": "image_embeds",
        "image_embeds": {"image_grid_thw": [1, 4, 4]},
        "uuid": "ab" * 32,
    }
    with pytest.raises(RequestFailedError):
        server.post(
            "v1/chat/completions",
            {
                "model": "tiny",
                "messages": [
                    {"role": "user", "content": [unknown, {"type": "text", "text": TEXT}]}
                ],
            },
        )
    assert server.chat(TEXT, [PICTURE]).token_ids == expected
    assert server.alive
    server.stop()


SCRIPT = """
import sys
from vllm import LLM, SamplingParams
from vllm.config import ECTransferConfig
from lmcache_ec.testing.vllm_server import chat_messages

if __name__ == "__main__":
    ec = ECTransferConfig(ec_connector="LMCacheECConnector", ec_role="ec_both")
    llm = LLM(sys.argv[1], ec_transfer_config=ec, enforce_eager=True, max_model_len=512,
              max_num_seqs=1, kv_cache_memory_bytes=32 << 20)
    picture = open(sys.argv[2], "rb").read()
    llm.chat(chat_messages("Hm?", [picture]), SamplingParams(max_tokens=2), use_tqdm=False)
    print("ANSWERED")
"""


def test_a_script_gives_its_memory_back(
    model_dir: Callable[[str], Path], memory_dir: Path, tmp_path: Path
) -> None:
    """vLLM kills its engine at the end of one, and shows no metrics in it."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "picture.png").write_bytes(PICTURE)
    command = [sys.executable, "script.py", str(model_dir("qwen2_vl")), "picture.png"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    output = subprocess.run(
        command,
        check=True,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "ANSWERED" in output.stdout
    assert "lmcache-ec: memory tier of" in output.stdout + output.stderr
    assert list(memory_dir.iterdir()) == []
