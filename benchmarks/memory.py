"""The memory tier against a plain copy, LMCache's encoder cache and safetensors files.

``make bench`` runs it; docs/benchmarks.md says what each figure means. Every contender has its
own process and its own buffers, and all take turns: one round is one pass of each over all of its
buffers. The buffers of one contender exceed the last-level cache by far, since a copy of one
buffer again and again would measure the cache.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import venv
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from lmcache_ec.testing.vllm_site import child_pythonpath

ROOT = Path(__file__).resolve().parent.parent
LMCACHE_VENV = ROOT / ".venv-lmcache"
LMCACHE_REQUIREMENTS = ("torch==2.13.0", "lmcache==0.5.6")
SIZES_MB = (0.5, 4.5, 14.0, 42.0)
ROUNDS, QUICK_ROUNDS = 15, 3
MIN_BUFFERS = 4
CACHES = 4  # the buffers of one contender fill the last-level cache this many times
FALLBACK_CACHE_BYTES = 32 << 20
NOISE = 1.03  # a smaller difference says nothing
CLOSE_TIMEOUT_S = 30

OURS, LMCACHE, FILES, COPY = "lmcache-ec", "LMCache 0.5.6", "safetensors", "copy_"
MODULES = {COPY: "copy", OURS: "lmcache_ec", LMCACHE: "lmcache", FILES: "files"}


@dataclass(frozen=True)
class Row:
    """One line of the large table.

    Attributes:
        group: What all rows with the same text do.
        label: Who does it, and how.
        contender: Key of ``MODULES``.
        operation: What that contender calls it.
        yardstick: Operation of ``copy_`` that it is divided by.
    """

    group: str
    label: str
    contender: str
    operation: str
    yardstick: str


WRITE, READ, USE = "write", "read", "read, then use once"
ROWS = (
    Row(WRITE, "copy_ into warm memory", COPY, "warm", "warm"),
    Row(WRITE, f"{OURS} put", OURS, "write", "warm"),
    Row(WRITE, f"{LMCACHE} put", LMCACHE, "write", "warm"),
    Row(WRITE, f"{FILES} save_file", FILES, "write", "warm"),
    Row("read, into the caller's own tensor", "copy_ into warm memory", COPY, "warm", "warm"),
    Row("read, into the caller's own tensor", f"{OURS} lease, copy_", OURS, "read_arena", "warm"),
    Row(READ, "copy_ into a fresh tensor", COPY, "fresh", "fresh"),
    Row(READ, f"{OURS} get", OURS, "read", "fresh"),
    Row(READ, f"{OURS} load in vLLM", OURS, "load", "fresh"),
    Row(READ, f"{LMCACHE} get", LMCACHE, "read", "fresh"),
    Row(READ, f"{FILES} load_file", FILES, "read", "fresh"),
    Row(USE, f"{OURS} get", OURS, "read_use", "fresh"),
    Row(USE, f"{LMCACHE} get", LMCACHE, "read_use", "fresh"),
    Row(USE, f"{FILES} load_file", FILES, "read_use", "fresh"),
)
CALLS = {
    "save": "save_caches, nothing queued",
    "save_busy": "save_caches, others queued",
    "has": "has_cache_item",
    "lookup": "ensure_cache_available, a hit in memory",
    "finish": "request_finished, one lease",
}


@dataclass(frozen=True)
class Timing:
    """All that was measured of one operation at one size, in seconds.

    Attributes:
        median: Over all calls.
        p99: Over all calls.
        rounds: The median of each round.
    """

    median: float
    p99: float
    rounds: tuple[float, ...]


Results = dict[tuple[float, str, str], Timing]
"""By size in MB, contender and operation."""


class Process:
    """A contender's process; it stays idle until asked."""

    def __init__(self, name: str, python: Path, argument: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        if name == OURS:
            environment["PYTHONPATH"] = child_pythonpath()
        self._name = name
        self._process = subprocess.Popen(
            [python, "-m", f"benchmarks.contenders.{MODULES[name]}", argument],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment,
        )  # fmt: skip

    def prepare(self, nbytes: int, buffers: int) -> list[str]:
        """Make the buffers; the names of the operations."""
        names: list[str] = self._ask({"bytes": nbytes, "buffers": buffers})
        return names

    def run(self, operation: str) -> list[float]:
        """One pass; seconds, one a call."""
        seconds: list[float] = self._ask({"operation": operation})
        return seconds

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, request: dict[str, object]) -> list:  # type: ignore[type-arg]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self._name} failed; what it said is above")
        return json.loads(answer)  # type: ignore[no-any-return]


def measure(pythons: dict[str, Path], rounds: int) -> Results:
    """Let all contenders take turns at every size."""
    results: Results = {}
    with ExitStack() as stack:
        shm = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir="/dev/shm"))
        processes = {}
        for name, python in pythons.items():
            directory = Path(shm) / MODULES[name]
            directory.mkdir()
            processes[name] = Process(name, python, str(directory))
            stack.callback(processes[name].close)
        for size in SIZES_MB:
            print(f"measuring {size} MB", file=sys.stderr, flush=True)
            nbytes = round(size * 1e6)
            buffers = buffer_count(nbytes)
            operations = {name: p.prepare(nbytes, buffers) for name, p in processes.items()}
            passes: dict[tuple[str, str], list[list[float]]] = {}
            for number in range(-1, rounds):  # the first one fills the tiers and is not counted
                for name, process in processes.items():
                    for operation in operations[name]:
                        seconds = process.run(operation)
                        if number >= 0:
                            passes.setdefault((name, operation), []).append(seconds)
            for (name, operation), times in passes.items():
                calls = sorted(second for seconds in times for second in seconds)
                results[size, name, operation] = Timing(
                    statistics.median(calls),
                    calls[len(calls) * 99 // 100],
                    tuple(statistics.median(seconds) for seconds in times),
                )
    return results


def buffer_count(nbytes: int) -> int:
    """How many buffers of ``nbytes`` exceed the last-level cache ``CACHES`` times."""
    cache = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    cache_bytes = FALLBACK_CACHE_BYTES
    if cache.exists():
        cache_bytes = int(cache.read_text().strip().removesuffix("K")) << 10
    return max(MIN_BUFFERS, -(-CACHES * cache_bytes // nbytes))


def speed(results: Results, size: float, row: Row) -> float:
    """Speed as a part of ``copy_``'s: the median of the ratios of each round."""
    theirs = results[size, COPY, row.yardstick].rounds
    own = results[size, row.contender, row.operation].rounds
    return statistics.median(a / b for a, b in zip(theirs, own, strict=True))


# ---------------------------------------------------------------------- what is printed


def table(results: Results) -> list[str]:
    """The large table: median ms of one call, and speed as a part of ``copy_``'s."""
    head = "".join(f"{f'{size:g} MB':>18}" for size in SIZES_MB)
    lines = [f"{'ms of one call (speed, copy_ = 1)':42}{head}"]
    group = ""
    for row in ROWS:
        if (SIZES_MB[0], row.contender, row.operation) not in results:
            continue
        if row.group != group:
            group = row.group
            lines.append(group)
        cells = (
            f"{results[size, row.contender, row.operation].median * 1e3:.3f}"
            f" ({speed(results, size, row):.2f})"
            for size in SIZES_MB
        )
        lines.append(f"  {row.label:40}" + "".join(f"{cell:>18}" for cell in cells))
    lines.append("on vLLM's threads, microseconds: median / p99")
    for operation, label in CALLS.items():
        timings = (results[size, OURS, operation] for size in SIZES_MB)
        cells = (f"{timing.median * 1e6:.1f} / {timing.p99 * 1e6:.0f}" for timing in timings)
        lines.append(f"  {label:40}" + "".join(f"{cell:>18}" for cell in cells))
    return lines


def aims(results: Results) -> list[str]:
    """What this benchmark is to show, each with the figures that show it or do not."""
    lines = []
    for operation, name in (("write", "put"), ("read_arena", "lease and copy_")):
        row = next(r for r in ROWS if (r.contender, r.operation) == (OURS, operation))
        worst = min(speed(results, size, row) for size in SIZES_MB if size >= 4.5)
        lines.append(_aim(worst >= 0.9, f"{name} at 0.9 of copy_ from 4.5 MB up: {worst:.2f}"))
    for operation, limit_us in (("save", 100), ("save_busy", 100), ("has", 5), ("lookup", 50)):
        slowest = max(results[size, OURS, operation].median for size in SIZES_MB) * 1e6
        text = f"{CALLS[operation]} under {limit_us} us at any size: {slowest:.1f}"
        lines.append(_aim(slowest < limit_us, text))
    if (SIZES_MB[0], LMCACHE, "write") in results:
        lost = [line for line in slower(results) if LMCACHE in line]
        lines.append(_aim(not lost, f"never slower than {LMCACHE}: {len(lost)} cases below"))
    return lines


def _aim(reached: bool, text: str) -> str:
    return f"  {'reached' if reached else 'MISSED ':8} {text}"


def slower(results: Results) -> list[str]:
    """Where a contender other than ``copy_`` takes less time than lmcache-ec."""
    lines = []
    for row in ROWS:
        if row.contender in {OURS, COPY}:
            continue
        for size in SIZES_MB:
            if (size, row.contender, row.operation) not in results:
                continue
            theirs = results[size, row.contender, row.operation].rounds
            own = results[size, OURS, row.operation].rounds
            ratio = statistics.median(a / b for a, b in zip(own, theirs, strict=True))
            if ratio > NOISE:
                lines.append(f"  {row.group}, {size:g} MB: {row.label} takes 1/{ratio:.2f} of ours")
    return lines or ["  nothing: no contender is faster at any size"]


def noise(results: Results) -> str:
    """How far the yardstick itself moved between rounds."""
    spreads = []
    for size in SIZES_MB:
        rounds = results[size, COPY, "warm"].rounds
        spreads.append(f"{(max(rounds) / min(rounds) - 1) * 100:.0f} %")
    return f"copy_ varied between rounds by {', '.join(spreads)}"


def machine() -> dict[str, str]:
    """What the figures depend on."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = next(line for line in cpuinfo.splitlines() if line.startswith("model name"))

    def git(*arguments: str) -> str:
        answer = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return answer.stdout.strip()

    changed = " with changes" if git("status", "--porcelain", "src", "benchmarks") else ""
    return {
        "commit": (git("rev-parse", "--short", "HEAD") or "unknown") + changed,
        "cpu": f"{model.split(':')[1].strip()}, {os.cpu_count()} cores",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": f"{os.getloadavg()[0]:.1f} at the end",
        "date": f"{dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M} UTC",
    }


# ---------------------------------------------------------------------- LMCache's environment


def install_lmcache() -> None:
    """Make ``.venv-lmcache``: LMCache's requirements do not go with vLLM's for CPUs."""
    print(f"making {LMCACHE_VENV}: 2 GB, a minute or more", file=sys.stderr, flush=True)
    venv.create(LMCACHE_VENV, with_pip=True)
    subprocess.run(
        [LMCACHE_VENV / "bin/python", "-m", "pip", "install", "--quiet", *LMCACHE_REQUIREMENTS],
        check=True,
    )


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, help=f"rounds at each size, {ROUNDS} by default")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results there")
    parser.add_argument(
        "--with-lmcache", action="store_true", help=f"install LMCache into {LMCACHE_VENV.name}"
    )
    options = parser.parse_args()
    here = Path(sys.executable)
    pythons = {COPY: here, OURS: here, FILES: here}
    lmcache_python = LMCACHE_VENV / "bin/python"
    if options.with_lmcache and not lmcache_python.exists():
        install_lmcache()
    if lmcache_python.exists():
        pythons[LMCACHE] = lmcache_python
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)

    results = measure(pythons, rounds)
    about = machine()
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    buffers = ", ".join(str(buffer_count(round(size * 1e6))) for size in SIZES_MB)
    print(f"bf16, one thread, {rounds} rounds over {buffers} buffers each; {noise(results)}")
    if LMCACHE not in pythons:
        print(f"{LMCACHE} is not installed: python benchmarks/memory.py --with-lmcache (2 GB)")
    print("\n".join(table(results)))
    print("aims", *aims(results), "what is not faster", *slower(results), sep="\n")
    if options.json:
        timings = [
            {"mb": size, "contender": name, "operation": operation, **asdict(timing)}
            for (size, name, operation), timing in results.items()
        ]
        options.json.write_text(json.dumps({**about, "timings": timings}, indent=1) + "\n")


if __name__ == "__main__":
    main()
