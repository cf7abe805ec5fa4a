"""The scheduler half over a real engine, with vLLM's own request objects."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from lmcache_ec import ECCacheEngine, ECMetadata, load_ec_engine_config

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("vllm", reason="vLLM is not installed; `make test` installs it")

from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)
from vllm.v1.request import Request

from lmcache_ec.vllm.content import EntryNames
from lmcache_ec.vllm.plan import WorkerReport
from lmcache_ec.vllm.scheduler import SchedulerHalf
from vllm import SamplingParams

WIDTH = 32
WORKERS = [b"rank 0".ljust(16), b"rank 1".ljust(16)]
ROWS = 6


def name(text: str) -> str:
    """An identifier as vLLM makes it from media."""
    return hashlib.sha256(text.encode()).hexdigest()


def output(seed: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()


def item(**fields: torch.Tensor | None) -> MultiModalKwargsItem:
    shared = MultiModalSharedField(batch_size=1)
    return MultiModalKwargsItem(
        {field: MultiModalFieldElem(data=data, field=shared) for field, data in fields.items()}
    )


MEDIA = item(pixel_values=torch.zeros(8, 8), image_grid_thw=torch.tensor([1, 2, 2]))
DESCRIPTION = item(pixel_values=None, image_grid_thw=torch.tensor([1, 2, 2]))


def request(
    request_id: str,
    *identifiers: str,
    rows: int = ROWS,
    data: MultiModalKwargsItem | None = MEDIA,
    mm_hash: str | None = None,
) -> Request:
    features = [
        MultiModalFeatureSpec(
            data=data,
            modality="image",
            identifier=identifier,
            mm_position=PlaceholderRange(offset=2 + number * (rows + 2), length=rows),
            mm_hash=mm_hash or identifier,
        )
        for number, identifier in enumerate(identifiers)
    ]
    length = 4 + len(identifiers) * (rows + 2)
    return Request(
        request_id, [1] * length, SamplingParams(max_tokens=4), None, mm_features=features
    )


class Cache:
    """An engine with its scheduler half, as one server's process has them."""

    def __init__(self, shm: Path, disk: Path | None = None, **options: object) -> None:
        settings: dict[str, object] = {
            "shm_path": str(shm),
            "max_local_cpu_size": 0.03,
            **options,
        }
        if disk is not None:
            settings["local_disk"] = str(disk)
        self.engine = ECCacheEngine(
            load_ec_engine_config(settings), ECMetadata("model"), torch.bfloat16
        )
        self.half = SchedulerHalf(
            self.engine,
            workers=WORKERS,
            budget_s=self.engine.config.prefetch_timeout_ms / 1000,
            may_load=True,
            may_save=True,
            widths={"image": WIDTH},
            names=EntryNames(
                client_uuids=self.engine.config.cache_client_uuids,
                verify_content=self.engine.config.verify_content,
                metadata_fields=lambda _: {"image_grid_thw"},
            ),
        )

    def put(self, identifier: str, tensor: torch.Tensor) -> None:
        """Keep what the encoder gave for ``MEDIA`` under this identifier."""
        self.engine.put(self.entry(identifier), tensor)

    def entry(self, identifier: str) -> str:
        name = self.half._names.of(request("any", identifier).mm_features[0])
        assert name is not None
        return name

    def loaded(self, step: int, *workers: bytes) -> None:
        """These workers, or all of them, have loaded what the plan of that step promised."""
        for worker in workers or WORKERS:
            self.engine.memory.note(worker, step)
        self.half.release_loaded()

    def plan(self, wanted: Request) -> None:
        """The first item of the request is scheduled."""
        if not self.half.plan_load(wanted, 0):
            self.half.plan_save(wanted, 0)

    @property
    def pinned(self) -> int:
        return self.engine.memory.usage().pinned

    def settle(self, wanted: Request, timeout_s: float = 10.0) -> bool:
        """Ask as vLLM does, step after step, until the request may run."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.half.ensure_cache_available(wanted, 0):
                return True
            time.sleep(0.001)
        return False


@pytest.fixture
def shm() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="lmcache-ec-test-", dir="/dev/shm"))
    yield directory
    left = [path.name for path in directory.iterdir()]
    shutil.rmtree(directory)
    assert left == []


@pytest.fixture
def cache(shm: Path) -> Iterator[Cache]:
    cache = Cache(shm)
    yield cache
    cache.half.shutdown()


@pytest.fixture
def disk_cache(shm: Path, tmp_path: Path) -> Iterator[Cache]:
    cache = Cache(shm, tmp_path, prefetch_timeout_ms=60_000)
    yield cache
    cache.half.shutdown()


def on_disk_only(cache: Cache, identifier: str, tensor: torch.Tensor) -> None:
    """Put, write down, then push it out of memory."""
    cache.put(identifier, tensor)
    cache.engine.flush()
    for number in range(20):
        cache.engine.put(name(f"filler {number}"), torch.zeros(1 << 20).bfloat16())
        cache.engine.flush()
    assert not cache.engine.memory.contains(cache.engine._key(cache.entry(identifier)))


def test_a_hit_is_leased_before_it_is_promised(cache: Cache) -> None:
    picture = name("a")
    cache.put(picture, output(1))
    wanted = request("r", picture)
    assert not cache.half.has_cache_item(picture)
    assert cache.half.ensure_cache_available(wanted, 0)
    assert cache.half.has_cache_item(picture)
    assert cache.pinned > 0
    cache.half.request_finished(wanted)
    assert not cache.half.has_cache_item(picture)
    assert cache.pinned == 0


def test_a_plan_keeps_its_bytes_until_every_worker_has_reported(cache: Cache) -> None:
    """An abort between planning and loading must not free what the workers are about to read."""
    picture = name("a")
    cache.put(picture, output(1))
    wanted = request("r", picture)
    cache.half.ensure_cache_available(wanted, 0)
    cache.plan(wanted)
    plan = cache.half.build_connector_meta()
    cache.half.request_finished(wanted)
    assert cache.pinned > 0
    for number in range(40):  # what is not pinned is evicted several times over
        cache.engine.put(name(f"other {number}"), torch.zeros(1 << 20).bfloat16())
    ((identifier, extent),) = plan.loads
    assert identifier == picture
    assert torch.equal(cache.engine.memory.view(extent, torch.bfloat16), output(1))
    cache.loaded(plan.step, WORKERS[0])
    assert cache.pinned > 0
    cache.loaded(plan.step - 1, WORKERS[1])
    assert cache.pinned > 0
    cache.loaded(plan.step)
    assert cache.pinned == 0


def test_what_workers_count_is_added_up(cache: Cache) -> None:
    one, two = (WorkerReport({("drops", "save_queue_full"): by}) for by in (1, 2))
    cache.half.update_connector_output(one.aggregate(two))
    assert cache.engine.events.value("drops", "save_queue_full") == 3


def test_a_computed_item_is_planned_as_a_save_and_not_as_a_load(cache: Cache) -> None:
    wanted = request("r", name("new"))
    assert cache.half.ensure_cache_available(wanted, 0)
    cache.plan(wanted)
    plan = cache.half.build_connector_meta()
    assert plan.loads == ()
    assert plan.saves == {name("new"): cache.entry(name("new"))}
    assert cache.half.build_connector_meta().saves == {}


def test_a_disk_entry_defers_its_request_and_no_other(disk_cache: Cache) -> None:
    cold, fresh = name("cold"), name("fresh")
    on_disk_only(disk_cache, cold, output(3))
    waiting = request("waiting", cold)
    disk_cache.half.ensure_cache_available(waiting, 0)
    assert disk_cache.settle(request("new", fresh))
    assert not disk_cache.half.has_cache_item(fresh)
    assert disk_cache.settle(waiting)
    assert disk_cache.half.has_cache_item(cold)
    disk_cache.plan(waiting)
    plan = disk_cache.half.build_connector_meta()
    assert torch.equal(disk_cache.engine.memory.view(plan.loads[0][1], torch.bfloat16), output(3))
    disk_cache.loaded(plan.step)
    disk_cache.half.request_finished(waiting)


def test_a_request_aborted_while_deferred_leaves_nothing_behind(disk_cache: Cache) -> None:
    cold = name("cold")
    on_disk_only(disk_cache, cold, output(3))
    wanted = request("r", cold)
    disk_cache.half.ensure_cache_available(wanted, 0)
    disk_cache.half.request_finished(wanted)
    assert not disk_cache.half.has_cache_item(cold)
    assert disk_cache.settle(request("later", cold))  # the read went on, for the next request
    disk_cache.half.request_finished(request("later", cold))
    deadline = time.monotonic() + 10
    while disk_cache.pinned and time.monotonic() < deadline:
        time.sleep(0.01)
    assert disk_cache.pinned == 0


def test_past_the_budget_the_encoder_runs(shm: Path, tmp_path: Path) -> None:
    cache = Cache(shm, tmp_path, prefetch_timeout_ms=0)
    cold = name("cold")
    on_disk_only(cache, cold, output(3))
    wanted = request("r", cold)
    assert cache.half.ensure_cache_available(wanted, 0)
    if not cache.half.has_cache_item(cold):  # unless the read was faster than one call
        assert cache.engine.events.value("misses", "timeout") == 1
    cache.half.request_finished(wanted)
    cache.half.shutdown()


def test_items_already_computed_are_not_looked_up(cache: Cache) -> None:
    pictures = [name("a"), name("b")]
    for number, picture in enumerate(pictures):
        cache.put(picture, output(number))
    wanted = request("r", *pictures)
    first = wanted.mm_features[0].mm_position
    assert cache.half.ensure_cache_available(wanted, first.offset + first.length)
    assert not cache.half.has_cache_item(pictures[0])
    assert cache.half.has_cache_item(pictures[1])
    cache.half.request_finished(wanted)


def test_a_lease_ends_with_its_item_and_comes_back_after_a_preemption(cache: Cache) -> None:
    picture = name("a")
    cache.put(picture, output(1))
    wanted = request("r", picture)
    cache.half.ensure_cache_available(wanted, 0)
    cache.half.update_state_after_free(wanted, 0)
    assert cache.pinned == 0
    assert cache.half.ensure_cache_available(wanted, len(wanted.prompt_token_ids))
    assert cache.pinned == 0
    assert cache.half.ensure_cache_available(wanted, 0)
    assert cache.half.has_cache_item(picture)
    cache.half.request_finished(wanted)


def test_one_item_shared_by_two_requests_outlives_the_first(cache: Cache) -> None:
    picture = name("a")
    cache.put(picture, output(1))
    one, two = request("one", picture, picture), request("two", picture)
    assert cache.half.ensure_cache_available(one, 0)
    assert cache.half.ensure_cache_available(two, 0)
    cache.half.request_finished(one)
    assert cache.half.has_cache_item(picture)
    cache.half.request_finished(two)
    assert not cache.half.has_cache_item(picture)
    assert cache.pinned == 0


@pytest.mark.parametrize("shape", [(ROWS - 1, WIDTH), (ROWS + 1, WIDTH), (ROWS, WIDTH * 2)])
def test_another_shape_is_a_miss(cache: Cache, shape: tuple[int, int]) -> None:
    cache.put(name("a"), torch.ones(shape))
    wanted = request("r", name("a"))
    assert cache.half.ensure_cache_available(wanted, 0)
    assert not cache.half.has_cache_item(name("a"))
    assert cache.engine.events.value("misses", "shape") == 1
    assert cache.pinned == 0
    cache.half.request_finished(wanted)


@pytest.mark.parametrize(
    "identifier",
    ["my-uuid", "", "../../etc/passwd", "x" * 5000, "a\0b", "renderer0-mm-1-image-0"],
)
def test_what_does_not_identify_is_neither_looked_up_nor_saved(
    cache: Cache, identifier: str
) -> None:
    wanted = request("r", identifier)
    assert cache.half.ensure_cache_available(wanted, 0)
    cache.plan(wanted)
    plan = cache.half.build_connector_meta()
    assert (plan.loads, plan.saves) == ((), {})
    assert cache.engine.events.snapshot() == []
    cache.half.request_finished(wanted)


def test_an_operator_may_allow_uuids_but_never_counters_or_loras(shm: Path) -> None:
    cache = Cache(shm, cache_client_uuids=True)
    saved: set[str] = set()
    for number, (identifier, mm_hash) in enumerate(
        [("my-uuid", None), ("renderer0-mm-1-image-0", None), (f"lora:{name('a')}", name("a"))]
    ):
        wanted = request(f"r{number}", identifier, mm_hash=mm_hash)
        assert cache.half.ensure_cache_available(wanted, 0)
        cache.plan(wanted)
        saved.update(cache.half.build_connector_meta().saves)
        cache.half.request_finished(wanted)
    assert saved == {"my-uuid"}
    cache.half.shutdown()


OTHER_MEDIA = item(pixel_values=torch.ones(8, 8), image_grid_thw=torch.tensor([1, 2, 2]))


@pytest.mark.parametrize("identifier", [name("a uuid that vLLM digested"), "logo"])
def test_an_identifier_reused_for_other_media_is_a_miss(shm: Path, identifier: str) -> None:
    cache = Cache(shm, cache_client_uuids=True)
    cache.put(identifier, output(1))
    other = request("other", identifier, data=OTHER_MEDIA)
    assert cache.half.ensure_cache_available(other, 0)
    assert not cache.half.has_cache_item(identifier)
    cache.plan(other)
    (saved,) = cache.half.build_connector_meta().saves.values()
    assert saved != cache.entry(identifier)
    cache.half.request_finished(other)
    cache.half.shutdown()


def test_a_request_waits_while_its_identifier_is_promised_for_other_media(shm: Path) -> None:
    """``has_cache_item`` knows identifiers only, so it would be given the other's tensor."""
    cache = Cache(shm, cache_client_uuids=True)
    cache.put("logo", output(1))
    cache.put("other", output(2))
    first = request("first", "logo")
    second = request("second", "other", "logo", data=OTHER_MEDIA)
    assert cache.half.ensure_cache_available(first, 0)
    assert not cache.half.ensure_cache_available(second, 0)
    assert cache.half.ensure_cache_available(first, 0)
    cache.half.request_finished(first)
    assert cache.half.ensure_cache_available(second, 0)
    assert not cache.half.has_cache_item("logo")
    cache.half.request_finished(second)
    assert cache.pinned == 0
    cache.half.shutdown()


def test_a_request_does_not_wait_for_ever_for_an_identifier(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that it waits for may be waiting for the memory that it occupies."""
    monkeypatch.setattr("lmcache_ec.vllm.scheduler.CONFLICT_TIMEOUT_S", 0.05)
    cache = Cache(shm, cache_client_uuids=True)
    cache.put("logo", output(1))
    first, second = request("first", "logo"), request("second", "logo", data=OTHER_MEDIA)
    assert cache.half.ensure_cache_available(first, 0)
    assert not cache.settle(second, timeout_s=0.5)
    assert cache.half.take_unavailable_requests() == {"second"}
    for wanted in (first, second):
        cache.half.request_finished(wanted)
    cache.half.shutdown()


def test_one_identifier_for_two_items_of_a_request_is_left_to_vllm(shm: Path) -> None:
    cache = Cache(shm, cache_client_uuids=True)
    cache.put("logo", output(1))
    wanted = request("r", "logo", "logo")
    wanted.mm_features[1].data = OTHER_MEDIA
    assert cache.half.ensure_cache_available(wanted, 0)
    assert not cache.half.has_cache_item("logo")
    assert cache.half.ensure_cache_available(wanted, 0)
    cache.half.request_finished(wanted)
    assert cache.pinned == 0
    cache.half.shutdown()


def test_identifiers_alone_are_trusted_only_when_told_so(shm: Path) -> None:
    cache = Cache(shm, verify_content=False)
    cache.engine.put(name("a"), output(1))
    wanted = request("r", name("a"), data=OTHER_MEDIA)
    assert cache.half.ensure_cache_available(wanted, 0)
    assert cache.half.has_cache_item(name("a"))
    cache.half.request_finished(wanted)
    cache.half.shutdown()


def test_client_embeddings_are_neither_looked_up_nor_saved(cache: Cache) -> None:
    picture = name("a")
    cache.put(picture, output(1))
    wanted = request("r", picture, data=item(image_embeds=torch.zeros(ROWS, WIDTH)))
    assert cache.half.ensure_cache_available(wanted, 0)
    assert not cache.half.has_cache_item(picture)
    cache.plan(wanted)
    assert cache.half.build_connector_meta().saves == {}
    cache.half.request_finished(wanted)


def test_an_item_without_media_is_what_last_came_under_its_name(cache: Cache) -> None:
    cache.put(name("a"), output(1))
    sent = request("sent", name("a"))
    assert cache.half.ensure_cache_available(sent, 0)
    cache.half.request_finished(sent)
    named = request("named", name("a"), data=DESCRIPTION)
    assert cache.half.ensure_cache_available(named, 0)
    assert cache.half.has_cache_item(name("a"))
    cache.half.request_finished(named)


@pytest.mark.parametrize("works", [True, False])
def test_an_item_without_media_that_nobody_has_fails_its_own_request(
    cache: Cache, works: bool
) -> None:
    """Also where there is no cache at all: vLLM would die of it."""
    half = cache.half
    if not works:
        half = SchedulerHalf(
            None,
            workers=WORKERS,
            budget_s=1,
            may_load=True,
            may_save=True,
            widths={},
            names=cache.half._names,
        )
    for number, identifier in enumerate([name("b"), "my-uuid"]):
        wanted = request(f"r{number}", identifier, data=DESCRIPTION)
        assert not half.ensure_cache_available(wanted, 0)
        assert half.take_unavailable_requests() == {f"r{number}"}
        assert half.take_unavailable_requests() == set()
        half.request_finished(wanted)
    assert half.ensure_cache_available(request("media", name("c")), 0)


def test_hits_are_counted_when_they_are_loaded(cache: Cache) -> None:
    cache.put(name("a"), output(1))
    for number in range(3):
        wanted = request(f"r{number}", name("a"))
        assert cache.half.ensure_cache_available(wanted, 0)
        if number == 0:  # vLLM's own cache answers the others
            cache.plan(wanted)
    assert cache.engine.events.value("hits", "memory") == 1
    for number in range(3):
        cache.half.request_finished(request(f"r{number}", name("a")))
    cache.loaded(cache.half.build_connector_meta().step)
    assert cache.pinned == 0
