"""What a request brings of an item, and the name of its entry.

vLLM's identifier is a hash of the media, unless the client gave a ``uuid``. Then it is that text,
or a hash of that text and of options, which looks the same. So an entry is named by the identifier
and by a fingerprint of what the encoder would be given: an identifier that was reused for other
media is a miss, and never another picture's tensor.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from enum import Enum
from typing import TYPE_CHECKING

import torch
import xxhash

from lmcache_ec.vllm.identity import is_content_addressed, is_counter

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem


MAX_LATEST = 16384  # identifiers of which a request may name the media without sending them


class Content(Enum):
    """What a request brings of an item."""

    MEDIA = "something to encode"
    EMBEDDINGS = "an encoder output made by the client, which says nothing of our encoder"
    NAME = "its identifier and a description, but nothing to encode"


class EntryNames:
    """Names of entries for items of requests. Used from the scheduler's thread.

    Args:
        client_uuids: Whether items may be cached whose identifier is not a digest.
        verify_content: Whether a fingerprint of the processed media is part of the name.
        metadata_fields: For a modality, the fields of an item that describe its media without
            holding it.
    """

    def __init__(
        self,
        *,
        client_uuids: bool,
        verify_content: bool,
        metadata_fields: Callable[[str], Collection[str]],
    ) -> None:
        self._client_uuids = client_uuids
        self._verify_content = verify_content
        self._metadata_fields = metadata_fields
        self._latest: OrderedDict[str, str] = OrderedDict()  # identifier -> name of its entry
        # vLLM keeps processed items and hands the same object to every request that repeats one.
        self._known: dict[int, tuple[weakref.ref[MultiModalKwargsItem], str]] = {}

    def of(self, feature: MultiModalFeatureSpec) -> str | None:
        """The name of the item's entry; None if it must be neither looked up nor kept.

        An item that comes by name only has the entry of the media that last came under that name.
        Hashes the item's tensors the first time that it sees them: about 30 µs a megabyte.
        """
        identifier: str = feature.identifier
        if identifier != (feature.mm_hash or identifier):
            return None  # a LoRA on the encoder, whose name does not identify it
        if not is_content_addressed(identifier) and (
            not self._client_uuids or is_counter(identifier)
        ):
            return None
        content = self.content(feature)
        if content is Content.EMBEDDINGS:
            return None
        if not self._verify_content:
            return identifier
        if content is Content.NAME:
            return self._latest.get(identifier)
        if feature.data is None or "address" in feature.data:
            return None  # only the worker can see the media (--mm-processor-cache-type shm)
        fingerprint = self._fingerprint(feature.data)
        if fingerprint is None:
            return None
        name = f"{identifier}:{fingerprint}"
        self._latest[identifier] = name
        self._latest.move_to_end(identifier)
        if len(self._latest) > MAX_LATEST:
            self._latest.popitem(last=False)
        return name

    def content(self, feature: MultiModalFeatureSpec) -> Content:
        """What the request brings of the item."""
        if feature.data is None:  # vLLM keeps the media elsewhere
            return Content.MEDIA
        given = {name for name, element in feature.data.items() if element.data is not None}
        if any(name.endswith("_embeds") for name in given):
            return Content.EMBEDDINGS
        described = given <= set(self._metadata_fields(feature.modality))
        return Content.NAME if described else Content.MEDIA

    def _fingerprint(self, data: MultiModalKwargsItem) -> str | None:
        key = id(data)
        known = self._known.get(key)
        if known is not None and known[0]() is data:
            return known[1]
        hasher = xxhash.xxh3_128()
        for name in sorted(data):
            hasher.update(name.encode())
            if not _feed(hasher, data[name].data):
                return None
        value = hasher.hexdigest()
        self._known[key] = (weakref.ref(data, lambda _: self._known.pop(key, None)), value)
        return value


def _feed(hasher: xxhash.xxh3_128, value: object) -> bool:
    """Add a value of an item, with what tells it from others of the same bytes.

    False for a value of a kind that vLLM's items do not hold: it has no bytes that are known here.
    """
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        hasher.update(f"|{tensor.dtype}{tuple(tensor.shape)}|".encode())
        hasher.update(tensor.view(-1).view(torch.uint8).numpy().data)
        return True
    if isinstance(value, list | tuple):
        hasher.update(f"|{len(value)}|".encode())
        return all(_feed(hasher, item) for item in value)
    if value is None or isinstance(value, bool | int | float | str):
        hasher.update(f"|{value!r}|".encode())
        return True
    return False
