"""What names an entry: the namespace of the encoder and the ``mm_hash`` of the input.

Two tensors may share a name only if the same encoder would compute both from the same input.
vLLM's identifier covers the input; :class:`Namespace` covers the encoder.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property

from lmcache_ec.errors import InvalidKeyError

MAX_MM_HASH_BYTES = 4096  # keeps every header within entry.MAX_HEADER_BYTES


@dataclass(frozen=True)
class ECMetadata:
    """Identity of an encoder, as far as its configuration does not say it.

    Attributes:
        model_name: Name or path of the model.
        revision: Revision of the model, or "".
        weights: Fingerprint of the encoder's weights, the same on every host, or "".
        quantization: Quantization method, or "".
        output_format: Anything else that changes the encoder's output (processor options,
            model class, serving engine), as one canonical string, or "".
    """

    model_name: str
    revision: str = ""
    weights: str = ""
    quantization: str = ""
    output_format: str = ""


@dataclass(frozen=True)
class Namespace:
    """Everything that changes what an encoder would output for one input.

    Attributes:
        metadata: Identity of the encoder.
        dtype: Encoder output dtype, as in ``str(torch.dtype)`` without "torch.".
        namespace: The operator's own separation, for example a tenant.
        epoch: The operator's own version; a new one makes every entry a miss.
    """

    metadata: ECMetadata
    dtype: str
    namespace: str = ""
    epoch: str = ""

    @cached_property
    def canonical(self) -> str:
        """One JSON text with sorted keys, equal for equal namespaces; ASCII."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of :attr:`canonical`, 32 bytes."""
        return hashlib.sha256(self.canonical.encode("ascii")).digest()


@dataclass(frozen=True)
class CacheEngineKey:
    """The key of one entry, with the fields of LMCache's class of that name.

    LMCache's fields identify an entry by 64 bits only, so nothing here compares or stores by
    :attr:`chunk_hash`: names on disk, in the index and on remotes are :attr:`name`.

    Attributes:
        namespace: Identity of the encoder.
        mm_hash: Identity of the input: any text that UTF-8 can encode, at most
            ``MAX_MM_HASH_BYTES`` bytes.

    Raises:
        InvalidKeyError: ``mm_hash`` is not such a text.
    """

    namespace: Namespace
    mm_hash: str

    def __post_init__(self) -> None:
        if not isinstance(self.mm_hash, str):
            raise InvalidKeyError(f"mm_hash must be a str, not {type(self.mm_hash).__name__}")
        try:
            length = len(self.mm_hash.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise InvalidKeyError(
                f"mm_hash {self.mm_hash[:40]!r}… is not valid Unicode text ({error.reason} at "
                f"position {error.start}); hash it first"
            ) from None
        if length > MAX_MM_HASH_BYTES:
            raise InvalidKeyError(
                f"mm_hash {self.mm_hash[:40]!r}… has {length} bytes, more than "
                f"{MAX_MM_HASH_BYTES}; hash it first"
            )

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over the namespace's digest and ``mm_hash``: the full identity, 32 bytes."""
        return hashlib.sha256(self.namespace.digest + self.mm_hash.encode("utf-8")).digest()

    @cached_property
    def name(self) -> str:
        """:attr:`digest` as 64 lower-case hex digits; safe as a file or object name."""
        return self.digest.hex()

    @property
    def model_name(self) -> str:
        """Name of the model, as in LMCache's KV keys."""
        return self.namespace.metadata.model_name

    @property
    def world_size(self) -> int:
        """Always 1: encoder outputs are replicated over tensor-parallel ranks."""
        return 1

    @property
    def worker_id(self) -> int:
        """Always 0, for the same reason."""
        return 0

    @property
    def chunk_hash(self) -> int:
        """First 64 bits of SHA-256 of ``mm_hash``, as LMCache's encoder cache derives them."""
        return int.from_bytes(hashlib.sha256(self.mm_hash.encode("utf-8")).digest()[:8], "big")

    @property
    def dtype(self) -> str:
        """Encoder output dtype; never the KV cache's."""
        return self.namespace.dtype

    @property
    def request_configs(self) -> dict[str, str]:
        """Always empty."""
        return {}
