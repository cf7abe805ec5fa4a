"""What can go wrong, grouped by what the caller may do next.

    LMCacheECError
    ├── ConfigError        (also ValueError)  fix the setting it names, then start again
    ├── InvalidKeyError    (also ValueError)  this ``mm_hash`` or tensor can never be cached
    ├── CorruptEntryError  these bytes are not the entry that was asked for: delete, count, miss
    └── BackendError       a tier cannot serve this now: count, miss or drop, try again later

``ECCacheEngine.get`` and ``put`` raise only ``InvalidKeyError``; everything else becomes a miss
or a dropped put that is counted.
"""

from __future__ import annotations


class LMCacheECError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(LMCacheECError, ValueError):
    """A setting or a directory cannot be used; the message names it, its value and the remedy."""


class InvalidKeyError(LMCacheECError, ValueError):
    """The ``mm_hash`` or the tensor is of a kind that the cache refuses."""


class CorruptEntryError(LMCacheECError):
    """Bytes that should be an entry are damaged, foreign or belong to another key."""


class BackendError(LMCacheECError):
    """A tier failed: full, unreachable, read-only, over its deadline."""
