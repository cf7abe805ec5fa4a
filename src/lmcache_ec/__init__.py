"""Encoder cache: image, video and audio encoder outputs, kept and shared.

Importing this imports neither vLLM nor any client of a remote.
"""

from __future__ import annotations

from lmcache_ec.config import ECEngineConfig, load_ec_engine_config
from lmcache_ec.engine import ECCacheEngine
from lmcache_ec.errors import (
    BackendError,
    ConfigError,
    CorruptEntryError,
    InvalidKeyError,
    LMCacheECError,
)
from lmcache_ec.key import ECMetadata

__all__ = [
    "BackendError",
    "ConfigError",
    "CorruptEntryError",
    "ECCacheEngine",
    "ECEngineConfig",
    "ECMetadata",
    "InvalidKeyError",
    "LMCacheECError",
    "load_ec_engine_config",
]
