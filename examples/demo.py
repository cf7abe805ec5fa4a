"""Show that a real vLLM server encodes each picture once, and answers the same as without a cache.

``make demo`` runs it. Everything it writes lies in a temporary directory that it removes.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from lmcache_ec.testing.media import draw_pictures, noise_picture
from lmcache_ec.testing.tiny_models import make_tiny_model
from lmcache_ec.testing.vllm_server import VLLMServer

EC_TRANSFER_CONFIG = {"ec_connector": "LMCacheECConnector", "ec_role": "ec_both"}
TIERS = ("memory", "disk")
QUESTION = "What is in this picture?"
MAX_TOKENS = 12
BEGAN = time.monotonic()


@dataclass(frozen=True)
class Row:
    """What one request showed.

    Attributes:
        server: Which server answered.
        picture: Name of the picture and how it was sent.
        encoded: How many pictures the model's encoder computed for it.
        tiers: The tiers that count a hit for it.
        expected: The outcome that the cache promises, as ``outcome`` words it.
        ttft_s: Seconds to the first token.
        same_tokens: Whether the answer's tokens are those of the server without the connector.
    """

    server: str
    picture: str
    encoded: int
    tiers: tuple[str, ...]
    expected: str
    ttft_s: float
    same_tokens: bool

    @property
    def outcome(self) -> str:
        """ "ran", or "hit" with its tier; both at once would be a fault, and is shown as such."""
        hits = [f"hit ({tier})" for tier in self.tiers]
        return " + ".join((["ran"] if self.encoded else []) + hits) or "?"

    @property
    def good(self) -> bool:
        """Whether the request went as the cache promises."""
        return self.outcome == self.expected and self.same_tokens


def main() -> None:
    """Run the demo; exits with status 1 if a promise was broken."""
    with (
        tempfile.TemporaryDirectory(prefix="lmcache-ec-demo-") as directory,
        # A memory tier of the demo's own, apart from that of servers which run here already.
        tempfile.TemporaryDirectory(prefix="lmcache-ec-demo-", dir="/dev/shm") as memory,
    ):
        rows = _run(Path(directory), Path(memory))
    _print_table(rows)
    _print_medians(rows)
    broken = [number for number, row in enumerate(rows, 1) if not row.good]
    if broken:
        sys.exit(
            f"FAILED: request {', '.join(map(str, broken))}: a hit or the tokens are not right"
        )
    print(f"All {len(rows)} requests went as promised, in {time.monotonic() - BEGAN:.0f} s.")


def _run(directory: Path, memory: Path) -> list[Row]:
    _say("building a random-weight Qwen2-VL and drawing pictures")
    model = make_tiny_model("demo", directory / "model")
    media = directory / "pictures"
    files = draw_pictures(media)
    disk = directory / "disk"

    def server(name: str, host: str | None) -> VLLMServer:
        """A server of one host, whose memory tier is its own; without a connector if None."""
        _say(f"starting {name} (about 25 s)")
        environment = {}
        if host is not None:
            (memory / host).mkdir(exist_ok=True)
            environment = {
                "LMCACHE_EC_LOCAL_DISK": str(disk),
                "LMCACHE_EC_SHM_PATH": str(memory / host),
            }
        return VLLMServer(
            model,
            directory / "server.log",
            ec=EC_TRANSFER_CONFIG if host is not None else None,
            environment=environment,
            media_directory=media,
        )

    reference: dict[Path, list[int]] = {}
    rows: list[Row] = []

    def ask(vllm: VLLMServer, name: str, file: Path, expected: str, how: str) -> None:
        vllm.reset_caches()  # or vLLM's own caches would answer
        before = _hits(vllm)
        vllm.encoded_items()
        answer = vllm.chat(
            QUESTION, [file if how == "file" else file.read_bytes()], max_tokens=MAX_TOKENS
        )
        after = _hits(vllm)
        row = Row(
            name,
            f"{file.name} ({how})",
            vllm.encoded_items(),
            tuple(tier for tier in TIERS if after[tier] > before[tier]),
            expected,
            answer.ttft_s,
            reference.setdefault(file, answer.token_ids) == answer.token_ids,
        )
        rows.append(row)
        _say(f"  {row.picture}: {row.outcome}, first token after {row.ttft_s:.2f} s")

    with server("a server without the connector", None) as vllm:
        _warm_up(vllm)
        for file in files:
            ask(vllm, "no connector", file, "ran", "base64")
    if len({tuple(tokens) for tokens in reference.values()}) < len(files):
        sys.exit("FAILED: two pictures gave the same answer, so equal tokens would prove nothing")

    with server("a server with the connector", "one") as vllm:
        _warm_up(vllm)
        for file in files:
            ask(vllm, "first", file, "ran", "base64")
        for file in files:
            ask(vllm, "first", file, "hit (memory)", "file")

    with server("the server again, after its stop", "one") as vllm:
        _warm_up(vllm)
        for file in files:
            ask(vllm, "restarted", file, "hit (disk)", "base64")
        for file in files:
            ask(vllm, "restarted", file, "hit (memory)", "file")
        with server("a second server, with memory of its own and the same disk", "two") as second:
            _warm_up(second)
            for file in files:
                ask(second, "second", file, "hit (disk)", "base64")
    return rows


def _warm_up(vllm: VLLMServer) -> None:
    """Spend the costs of a server's first requests on a picture that is not measured."""
    vllm.chat("Are you there?", [noise_picture(None, 640, 480)], max_tokens=MAX_TOKENS)


def _hits(vllm: VLLMServer) -> dict[str, float]:
    return {tier: vllm.metric("vllm:lmcache_ec_hits_total", tier=tier) for tier in TIERS}


def _print_table(rows: list[Row]) -> None:
    print(
        "\nTime to first token of a small Qwen2-VL with random weights on a CPU. vLLM's own caches"
    )
    print("were emptied before each request. A trained model on a GPU has other times.\n")
    line = "{:>7}  {:<12}  {:<21}  {:<13}  {:>11}  {:<9}  {}"
    print(line.format("request", "server", "image", "encoder", "first token", "tokens", ""))
    for number, row in enumerate(rows, 1):
        tokens = "identical" if row.same_tokens else "DIFFERENT"
        print(
            line.format(
                number,
                row.server,
                row.picture,
                row.outcome,
                f"{row.ttft_s * 1000:.0f} ms",
                tokens,
                "" if row.good else f"<- expected {row.expected}",
            ).rstrip()
        )
    print()


def _print_medians(rows: list[Row]) -> None:
    """What README's table shows."""
    for text, chosen in {
        "server without the connector": [row for row in rows if row.server == "no connector"],
        "hit in memory": [row for row in rows if row.outcome == "hit (memory)"],
        "hit on disk": [row for row in rows if row.outcome == "hit (disk)"],
        "never seen, with the connector": [row for row in rows[3:] if row.outcome == "ran"],
    }.items():
        if chosen:
            median = statistics.median(row.ttft_s for row in chosen)
            print(f"{text:<32}first token after {median * 1000:5.0f} ms (median)")
    print()


def _say(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN:4.0f} s] {text}", flush=True)


if __name__ == "__main__":
    main()
