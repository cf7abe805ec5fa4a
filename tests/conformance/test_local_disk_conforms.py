"""The disk tier does what every tier must."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lmcache_ec.backends.local_disk import LocalDiskBackend
from lmcache_ec.events import Events
from lmcache_ec.testing.backend_suite import BackendSuite

if TYPE_CHECKING:
    from pathlib import Path

    from lmcache_ec.key import CacheEngineKey


class TestLocalDisk(BackendSuite):
    """Over a directory of its own."""

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.path = tmp_path / "disk"

    def open(self) -> LocalDiskBackend:
        return LocalDiskBackend(self.path, 1 << 30, Events())

    def file(self, key: CacheEngineKey) -> Path:
        return self.path / "ec" / key.name[:2] / f"{key.name}.safetensors"

    def raw_read(self, key: CacheEngineKey) -> bytes | None:
        return self.file(key).read_bytes() if self.file(key).exists() else None

    def raw_write(self, key: CacheEngineKey, data: bytes) -> None:
        self.file(key).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.file(key).write_bytes(data)
