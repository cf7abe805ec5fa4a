"""A fingerprint of the files that decide what a model's encoder computes.

Two hosts with the same files get the same fingerprint, under whatever path; other weights under
an old path get another one. A model from the hub is named by its commit, without reading it. A
local directory is hashed by content:

- ``*.safetensors``: each tensor by name, dtype, shape and bytes, so that sharding does not matter.
  The language model's decoder layers and head are left out, since no encoder uses them. A name
  that is not known to be one of these is hashed: at worst the first start is slower.
- ``*.bin``, ``*.pt``, ``*.pth``, ``*.gguf``: the whole file, with its name.
- ``*.json`` and ``*.py``: the same, since they configure the processor and the model, except those
  of the tokenizer, of text generation and the shard index.

What one file contributes is a 128-bit number and the fingerprint is their sum, so order does not
matter and each can be remembered alone. The operator's own files are no attacker, so XXH3 does.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import xxhash

from lmcache_ec.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
MAX_MEMO_BYTES = 16 << 20
MAX_MEMO_FILES = 4096
CHUNK_BYTES = 8 << 20

EPOCH_ONLY = "epoch-only"
EPOCH_REMEDY = "set the option `epoch` to a string that changes with the weights"

# Formats that read the model's own files and nothing else. Tensorizer, for example, reads from an
# address in its extra options, so the files beside the configuration say nothing about it.
_FILE_FORMATS = {
    "auto",
    "bitsandbytes",
    "fastsafetensors",
    "gguf",
    "hf",
    "instanttensor",
    "mistral",
    "npcache",
    "pt",
    "runai_streamer",
    "runai_streamer_sharded",
    "safetensors",
    "sharded_state",
}
_WHOLE_SUFFIXES = {".bin", ".gguf", ".pt", ".pth"}
_CONFIG_SUFFIXES = {".json", ".py"}
_IRRELEVANT = re.compile(
    # Left by training; vLLM does not load these either.
    r"training_args\.bin|optimizer\.(bin|pt)|scheduler\.pt|scaler\.pt|rng_state.*\.pth|"
    r"trainer_state\.json|"
    # Text only. config.json stays: it shapes the encoder.
    r".*\.index\.json|tokenizer(_config)?\.json|special_tokens_map\.json|added_tokens\.json|"
    r"vocab\.json|chat_template\.json|generation_config\.json"
)
_IRRELEVANT_DIRECTORIES = {"original", "__pycache__"}  # vLLM skips "original" as well
_LANGUAGE_MODEL = re.compile(
    r"((model|language_model|text_model|llm|thinker)\.)*(layers\.\d+|lm_head)\..*"
)
_SNAPSHOT = re.compile(r"/models--[^/]+/snapshots/(?P<commit>[0-9a-f]{40})/")
_MASK = (1 << 128) - 1


def fingerprint(model: str, *, commit: str | None, load_format: str, epoch: str) -> str:
    """Name the content of a model's encoder. May read the whole encoder from disk, once.

    The operator's epoch counts elsewhere; here it only stands in for weights that cannot be seen.

    Args:
        model: Directory, or name on the hub.
        commit: Commit that the hub resolved ``model`` to, if it did.
        load_format: vLLM's ``--load-format``.
        epoch: The operator's own version, or "".

    Returns:
        "epoch-only", "hub:<commit>" or "xxh3:<32 hex digits>"; after "dummy:" if the weights are
        made up, which vLLM does from one fixed seed, so that only the configuration counts.

    Raises:
        ConfigError: The weights cannot be found or read, and ``epoch`` is not set.
    """
    try:
        return _seen(model, commit, load_format)
    except ConfigError:
        if not epoch:
            raise
        return EPOCH_ONLY


def _seen(model: str, commit: str | None, load_format: str) -> str:
    if load_format == "dummy":
        return f"dummy:{config_fingerprint(model, commit=commit)}"
    if load_format not in _FILE_FORMATS:
        raise ConfigError(
            f"load_format {load_format!r} may take the weights of {model!r} from elsewhere, so "
            f"they cannot be told from newer ones; {EPOCH_REMEDY}"
        )
    return _fingerprint(model, commit, with_weights=True)


def config_fingerprint(model: str, *, commit: str | None) -> str:
    """Name the content of a model's configuration files and code, without its weights.

    Args:
        model: Directory, or name on the hub.
        commit: Commit that the hub resolved ``model`` to, if it did.

    Returns:
        "hub:<commit>" or "xxh3:<32 hex digits>".

    Raises:
        ConfigError: The files cannot be found or read.
    """
    return _fingerprint(model, commit, with_weights=False)


def _fingerprint(model: str, commit: str | None, *, with_weights: bool) -> str:
    root = Path(model)
    if not root.is_dir():
        if commit:
            return f"hub:{commit}"
        raise ConfigError(
            f"model {model!r} is neither a directory nor resolved to a commit of the hub, so its "
            f"weights cannot be told from newer ones; {EPOCH_REMEDY}"
        )
    if snapshot := _SNAPSHOT.search(f"{root.resolve()}/"):
        return f"hub:{snapshot['commit']}"

    suffixes = {".safetensors"} | _WHOLE_SUFFIXES
    files = sorted(_relevant_files(root))
    weights = [path for path in files if path.suffix in suffixes]
    if with_weights and not weights:
        raise ConfigError(
            f"model directory {model!r} holds no weights "
            f"({', '.join(f'*{suffix}' for suffix in sorted(suffixes))}); {EPOCH_REMEDY}"
        )
    memo = _Memo()
    total = sum(
        _file_digest(root, path, memo)
        for path in files
        if with_weights or path.suffix in _CONFIG_SUFFIXES
    )
    memo.save()
    return f"xxh3:{total & _MASK:032x}"


def _relevant_files(root: Path) -> Iterator[Path]:
    suffixes = {".safetensors"} | _WHOLE_SUFFIXES | _CONFIG_SUFFIXES
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [
            name
            for name in subdirectories
            if name not in _IRRELEVANT_DIRECTORIES and not name.startswith(".")
        ]
        for name in names:
            path = Path(directory, name)
            if path.suffix in suffixes and not _IRRELEVANT.fullmatch(name):
                yield path


def _file_digest(root: Path, path: Path, memo: _Memo) -> int:
    try:
        with path.open("rb", buffering=0) as file:
            before = os.fstat(file.fileno())
            # The digest holds the place below the root too, so it is part of the memo's key.
            key = f"{path.absolute()}\0{path.relative_to(root)}"
            if (known := memo.get(key, before)) is not None:
                return known
            place = path.relative_to(root).parent.as_posix()
            if path.suffix == ".safetensors":
                digest = _tensors_digest(path, file, before.st_size, place)
            else:
                digest = _digest(file, 0, before.st_size, ["file", place, path.name])
            if _identity(os.fstat(file.fileno())) == _identity(before):
                memo.put(key, before, digest)
            return digest
    except OSError as error:
        raise ConfigError(
            f"cannot read {str(path)!r} to tell these weights from others ({error.strerror}); "
            f"make it readable, or {EPOCH_REMEDY}"
        ) from error


def _tensors_digest(path: Path, file: BinaryIO, size: int, place: str) -> int:
    """Sum of the digests of the tensors, other than the language model's layers."""
    try:
        return sum(
            _digest(file, start, end - start, ["tensor", place, name, dtype, shape])
            for name, dtype, shape, start, end in _tensors(file, size)
            if not _LANGUAGE_MODEL.fullmatch(name)
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{str(path)!r} is not a whole safetensors file ({error}); download it again"
        ) from error


def _tensors(file: BinaryIO, size: int) -> Iterator[tuple[str, str, list[int], int, int]]:
    """Name, dtype, shape, and first and last+1 byte in the file, of each tensor."""
    length = int.from_bytes(file.read(8), "little")
    data = 8 + length
    if length > MAX_HEADER_BYTES or data > size:
        raise ValueError(f"its header claims {length} bytes")
    header = json.loads(file.read(length))
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        start, end = tensor["data_offsets"]
        if not 0 <= start <= end <= size - data:
            raise ValueError(f"tensor {name!r} lies outside the file")
        yield name, tensor["dtype"], tensor["shape"], data + start, data + end


def _digest(file: BinaryIO, start: int, length: int, names: list[object]) -> int:
    """XXH3-128 of ``names`` and ``length`` bytes of the file, in bounded memory."""
    hasher = xxhash.xxh3_128(json.dumps(names).encode("ascii") + b"\0")
    buffer = memoryview(bytearray(min(CHUNK_BYTES, length)))
    end = start + length
    while start < end:
        count = os.preadv(file.fileno(), [buffer[: end - start]], start)
        if count == 0:
            raise OSError(errno.EIO, f"it ends {end - start} bytes early")
        hasher.update(buffer[:count])
        start += count
    return hasher.intdigest()


def _identity(status: os.stat_result) -> list[int]:
    # The change time too: copying a file onto another can keep its size, time and inode.
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


class _Memo:
    """Digests of files read before, in the user's cache directory.

    It saves time only: if it is missing, damaged or not writable, files are hashed again. It is
    not read when others could have written it, since it decides which entries are shared.
    """

    def __init__(self) -> None:
        root = os.environ.get("XDG_CACHE_HOME") or str(Path("~").expanduser() / ".cache")
        self._path = Path(root, "lmcache-ec", "weights-1.json")
        self._known: dict[str, object] = {}
        self._changed = False
        with contextlib.suppress(OSError, ValueError, RecursionError):
            status = self._path.stat()
            if (
                _is_private(self._path.parent)
                and stat.S_ISREG(status.st_mode)
                and status.st_size <= MAX_MEMO_BYTES
            ):
                known = json.loads(self._path.read_bytes())
                self._known = known if isinstance(known, dict) else {}

    def get(self, key: str, status: os.stat_result) -> int | None:
        match self._known.get(key):
            case [*identity, str(digest)] if identity == _identity(status):
                return int(digest, 16) if re.fullmatch("[0-9a-f]{32}", digest) else None
        return None

    def put(self, key: str, status: os.stat_result, digest: int) -> None:
        self._known.pop(key, None)  # so that the oldest are first
        self._known[key] = [*_identity(status), f"{digest & _MASK:032x}"]
        self._changed = True

    def save(self) -> None:
        if not self._changed:
            return
        text = json.dumps(dict(list(self._known.items())[-MAX_MEMO_FILES:]))
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_private(self._path.parent):
                return
            handle, temporary = tempfile.mkstemp(prefix=".weights-", dir=self._path.parent)
            try:
                with os.fdopen(handle, "w") as file:
                    file.write(text)
                Path(temporary).replace(self._path)
            finally:
                Path(temporary).unlink(missing_ok=True)


def _is_private(directory: Path) -> bool:
    status = directory.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022
