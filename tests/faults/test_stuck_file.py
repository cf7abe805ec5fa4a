"""A file that cannot be removed costs its own bytes, and no more."""

from __future__ import annotations

from errno import EPERM
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_ec.backends.local_disk import LocalDiskBackend
from lmcache_ec.events import Events
from lmcache_ec.testing.backend_suite import make_bytes, make_key, read

if TYPE_CHECKING:
    import pytest

SIZE = 10_000


def test_eviction_goes_round_a_file_that_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Events()
    disk = LocalDiskBackend(tmp_path / "disk", 5 * SIZE, events)
    keys = [make_key(str(number)) for number in range(12)]
    disk.put(keys[0], [memoryview(make_bytes(SIZE, 0))])
    (stuck,) = (tmp_path / "disk").rglob("*.safetensors")
    unlink = Path.unlink

    def refuse(path: Path, *, missing_ok: bool = False) -> None:
        if path == stuck:
            raise PermissionError(EPERM, "immutable", str(path))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    for number, key in enumerate(keys[1:], 1):
        disk.put(key, [memoryview(make_bytes(SIZE, number))])
        files = (tmp_path / "disk").rglob("*.safetensors")
        assert sum(path.stat().st_size for path in files) <= 5 * SIZE
    assert read(disk, keys[0]) == make_bytes(SIZE, 0)
    assert read(disk, keys[-1]) == make_bytes(SIZE, 11)
    assert events.value("evictions", "disk") > 0
    disk.close()
