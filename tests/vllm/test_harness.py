"""The harness itself: equal tokens prove something, and the encoder's counter counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lmcache_ec.testing.media import noise_picture, tone
from lmcache_ec.testing.vllm_server import RequestFailedError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.vllm.conftest import OpenEngine, Reference, StartServer


@pytest.mark.parametrize("model", ["qwen2_vl", "qwen3_vl", "idefics3"])
def test_another_picture_gives_another_answer(model: str, open_engine: OpenEngine) -> None:
    pictures = [noise_picture(seed) for seed in range(4)]
    with open_engine(model) as engine:
        answers = [engine.generate("What is this?", [picture]) for picture in pictures]
        assert engine.encoded_items() == len(pictures)
    assert len({tuple(answer) for answer in answers}) == len(pictures)


def test_another_tone_gives_another_answer(open_engine: OpenEngine) -> None:
    with open_engine("qwen2_audio") as engine:
        answers = [engine.generate("Hm?", audios=[tone(hertz)]) for hertz in (200, 1000, 4000)]
        assert engine.encoded_items() == len(answers)
    assert len({tuple(answer) for answer in answers}) == len(answers)


def test_counter_sees_vllms_own_cache_and_each_item(open_engine: OpenEngine) -> None:
    first, second = noise_picture(1), noise_picture(2)
    with open_engine("qwen2_vl") as engine:
        answer = engine.generate("What is this?", [first])
        assert engine.encoded_items() == 1
        assert engine.generate("What is this?", [first]) == answer
        assert engine.encoded_items() == 0
        engine.reset_caches()
        assert engine.generate("What is this?", [first]) == answer
        assert engine.encoded_items() == 1
        engine.reset_caches()
        engine.generate("And these?", [first, second])
        assert engine.encoded_items() == 2


def test_server_answers_like_the_engine(
    reference: Reference, start_server: StartServer, tmp_path: Path
) -> None:
    file = tmp_path / "picture.jpg"
    file.write_bytes(noise_picture(3, file_format="JPEG"))
    expected = reference("qwen2_vl", "What is this?", [file.read_bytes()])
    server = start_server("qwen2_vl", media_directory=tmp_path)
    for picture in (file, file.read_bytes()):
        server.reset_caches()
        answer = server.chat("What is this?", [picture])
        assert answer.token_ids == expected
        assert answer.ttft_s > 0
        assert server.encoded_items() == 1
    assert server.metric("vllm:request_success_total") == 2
    with pytest.raises(RequestFailedError, match="cannot identify image") as refused:
        server.chat("What is this?", [b"no picture"])
    assert refused.value.status == 400
    server.kill()
    assert not server.alive


def test_server_that_cannot_start_shows_its_log(start_server: StartServer) -> None:
    with pytest.raises(RuntimeError, match="unrecognized arguments: --no-such-option"):
        start_server("qwen2_vl", arguments=["--no-such-option"])
