"""The encoder cache's settings, read from where LMCache and vLLM users already write theirs.

Sources, a later one wins:

1. plain keys of LMCache's YAML file,
2. ``LMCACHE_<KEY>`` variables,
3. ``ec_<key>`` keys and the ``ec:`` map of that file,
4. ``LMCACHE_EC_<KEY>`` variables,
5. vLLM's ``ec_connector_extra_config``.

The first two are LMCache's own, so what they say about other things is none of our business. The
last three speak to the encoder cache alone, so whatever has no effect there is logged.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import yaml

from lmcache_ec.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

logger = logging.getLogger(__name__)

GIB = 2**30
"""Bytes in one GiB."""

CONFIG_FILE_VARIABLE = "LMCACHE_CONFIG_FILE"
"""Variable that names LMCache's YAML file, as in LMCache."""

EXTRA_SOURCE = "ec_connector_extra_config"
"""What messages and ``ECEngineConfig.sources`` call vLLM's option."""

_BASE_PREFIX = "LMCACHE_"
_EC_VARIABLE_PREFIX = "LMCACHE_EC_"
_EC_PREFIX = "ec_"
_SHOWN_CHARS = 80  # of a bad value in an error
_MAX_LABEL_CHARS = 256  # labels are part of every entry's header
_MAX_TIMEOUT_MS = 3_600_000

_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})
_POLICIES = ("LRU", "LFU", "FIFO", "MRU")

_LMCACHE_NAMES = """
app_id audit_actual_remote_url blend_check_layers blend_min_tokens blend_recompute_ratios
blend_special_str blend_thresholds blocking_timeout_secs cache_policy chunk_size
chunk_statistics_auto_exit_target_unique_chunks chunk_statistics_auto_exit_timeout_hours
chunk_statistics_auto_start_statistics chunk_statistics_strategy controller_pull_url
controller_reply_url controller_url enable_async_loading enable_blending
enable_chunk_statistics enable_controller enable_hidden_state_cache enable_kv_events
enable_lazy_memory_allocator enable_p2p enable_pd enable_scheduler_bypass_lookup enable_xpyd
external_backends external_lookup_client extra_config gds_backend gds_buffer_size gds_path
gds_path_sharding hidden_state_layers hidden_states_retrieve_mode hit_miss_ratio
internal_api_server_enabled internal_api_server_host internal_api_server_include_index_list
internal_api_server_port_start internal_api_server_socket_path_prefix
lazy_memory_expand_trigger_ratio lazy_memory_initial_ratio lazy_memory_safe_size
lazy_memory_step_ratio lmcache_instance_id lmcache_worker_heartbeat_delay_time
lmcache_worker_heartbeat_time lmcache_worker_ids lmcache_worker_port lmcache_worker_ports
local_cpu local_cpu_use_hugepages local_disk local_disk_path_sharding
lookup_server_worker_ids lookup_timeout_ms maru_path maru_pool_size max_hidden_state_cpu_size
max_local_cpu_size max_local_disk_size min_retrieve_tokens mp_host mp_port nixl_backends
nixl_buffer_device nixl_buffer_size nixl_peer_alloc_port nixl_peer_host nixl_peer_init_port
nixl_peer_port nixl_proxy_host nixl_proxy_port nixl_role numa_mode p2p_host p2p_init_ports
p2p_lookup_ports pd_allocation_timeout_sec pd_backend_mode pd_bidirectional pd_buffer_device
pd_buffer_size pd_condition_poll_interval_sec pd_max_prefill_len pd_peer_alloc_port
pd_peer_host pd_peer_init_port pd_peer_query_port pd_proxy_host pd_proxy_port pd_role
pd_shutdown_timeout_sec pd_skip_proxy_notification pin_check_interval_sec pin_timeout_sec
plugin_locations pre_caching_hash_algorithm priority_limit py_enable_gc remote_config_url
remote_serde remote_storage_plugins remote_url reserve_local_cpu_size retrieve_locations
run_script_api_enabled runtime_plugin_locations save_decode_cache save_unfull_chunk
script_allowed_imports storage_plugins store_location transfer_channel use_gds
use_gpu_connector_v3 use_layerwise
"""
LMCACHE_KEYS = frozenset(_LMCACHE_NAMES.split())
"""Every key that LMCache 0.5.6 knows, deprecated names included."""

T = TypeVar("T")


@dataclass(frozen=True)
class Setting(Generic[T]):
    """One key with effect.

    Attributes:
        default: Value when nothing sets it.
        parse: Turns a value as written into one of the setting's type; None means "the default".
            Raises ``ValueError`` or ``OverflowError`` on what is not accepted.
        accepts: What ``parse`` accepts, in words.
        help: What the setting does, in one line.
    """

    default: T
    parse: Callable[[object], T | None]
    accepts: str
    help: str


def _setting(default: T, parse: Callable[[object], T | None], accepts: str, help_: str) -> T:
    row = Setting(default, parse, accepts, help_)
    value: T = field(default=default, metadata={"setting": row})
    return value


def _parse_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower() if isinstance(value, str | int) else ""
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError


def _parse_number(value: object) -> float:
    # A ValueError for every value that is not accepted, of a wrong type too: one error to handle.
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError  # noqa: TRY004
    return float(value)


def _parse_size(value: object) -> float:
    size = _parse_number(value)
    if not 1 <= size * GIB < 2**63:  # in bytes; false for nan too
        raise ValueError
    return size


def _parse_size_or_unset(value: object) -> float | None:
    # LMCache's files say 0 for "not set".
    return None if -math.inf < _parse_number(value) <= 0 else _parse_size(value)


def _parse_timeout(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError  # noqa: TRY004
    timeout = int(value)
    if not 0 <= timeout <= _MAX_TIMEOUT_MS:
        raise ValueError
    return timeout


def _parse_label(value: object) -> str:
    # YAML reads `epoch: 2` as a number; the variable says "2". Both must name the same epoch.
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError  # noqa: TRY004
    label = str(value)
    if len(label) > _MAX_LABEL_CHARS:
        raise ValueError
    return label


def _parse_policy(value: object) -> str:
    policy = value.strip().upper() if isinstance(value, str) else ""
    if policy not in _POLICIES:
        raise ValueError
    return policy


def _parse_directory(value: object) -> str:
    text = value.strip() if isinstance(value, str) else ""
    path = os.path.expanduser(text.removeprefix("file://"))  # noqa: PTH111 - a str, not a Path
    # A "~" that is left names an unknown user; any other "://" is not a path.
    if not path or path.startswith("~") or "://" in path or "," in path or "\0" in path:
        raise ValueError
    return os.path.abspath(path)  # noqa: PTH100 - links stay as they are written


def _parse_optional_directory(value: object) -> str | None:
    return None if value == "" else _parse_directory(value)


_ONE_DIRECTORY = "one directory, such as /var/cache/ec, ~/ec or file:///var/cache/ec"
_BOOL = "true or false"
_GIB = "a number of GiB above 0"
_LABEL = f"text of at most {_MAX_LABEL_CHARS} characters (in YAML, put it in quotes)"


@dataclass(frozen=True)
class ECEngineConfig:
    """What the encoder cache runs with. Sizes are in GiB; the properties give bytes.

    ``SETTINGS`` says what each field means, accepts and defaults to.

    Attributes:
        sources: For each key, where its value came from; "default" if nothing set it.
    """

    local_cpu: bool = _setting(True, _parse_bool, _BOOL, "Memory tier; always on")
    max_local_cpu_size: float = _setting(
        1.0,
        _parse_size_or_unset,
        f"{_GIB}, or 0 for the default",
        "GiB of the memory tier, which all processes of this user on this host share",
    )
    local_disk: str | None = _setting(
        None,
        _parse_optional_directory,
        f"{_ONE_DIRECTORY} (several, separated by commas, are not supported: set ec_local_disk "
        "to one)",
        "Directory of the disk tier; no disk tier without it",
    )
    max_local_disk_size: float = _setting(
        64.0,
        _parse_size_or_unset,
        f"{_GIB}, or 0 for the default",
        "GiB of the disk tier, which all users of the directory share",
    )
    cache_policy: str = _setting(
        "LRU", _parse_policy, f"one of {', '.join(_POLICIES)}", "Which entries make room first"
    )
    namespace: str = _setting(
        "", _parse_label, _LABEL, "Servers with different namespaces, e.g. tenants, share nothing"
    )
    epoch: str = _setting(
        "", _parse_label, _LABEL, "A new epoch makes every entry of the earlier ones a miss"
    )
    shm_path: str = _setting(
        "/dev/shm",  # noqa: S108 - the tmpfs itself; the tier makes a private directory in it
        _parse_directory,
        f"{_ONE_DIRECTORY}, on a tmpfs",
        "Directory on a tmpfs where the memory tier lives",
    )
    prefetch_timeout_ms: int = _setting(
        100,
        _parse_timeout,
        f"a whole number of milliseconds from 0 to {_MAX_TIMEOUT_MS}",
        "How many ms a request may wait for an entry on disk before its encoder runs",
    )
    max_queue_size: float = _setting(
        0.25,
        _parse_size,
        _GIB,
        "GiB that pending saves, and again pending write-downs, may keep alive",
    )
    cache_client_uuids: bool = _setting(
        False, _parse_bool, _BOOL, "Cache items that a client's uuid names, too"
    )
    verify_content: bool = _setting(
        True,
        _parse_bool,
        _BOOL,
        "Name entries by a hash of the processed media, too, and not by vLLM's identifier alone",
    )
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def max_local_cpu_bytes(self) -> int:
        """``max_local_cpu_size`` in bytes, at least 1."""
        return int(self.max_local_cpu_size * GIB)

    @property
    def max_local_disk_bytes(self) -> int:
        """``max_local_disk_size`` in bytes, at least 1; without ``local_disk`` nothing uses it."""
        return int(self.max_local_disk_size * GIB)

    @property
    def max_queue_bytes(self) -> int:
        """``max_queue_size`` in bytes, at least 1."""
        return int(self.max_queue_size * GIB)


SETTINGS: Mapping[str, Setting[Any]] = {
    f.name: f.metadata["setting"] for f in fields(ECEngineConfig) if "setting" in f.metadata
}
"""Every key with effect."""

_Found = tuple[str, object, str]  # key, value as written, source


def load_ec_engine_config(
    extra: Mapping[str, object] | None = None,
    *,
    config_file: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> ECEngineConfig:
    """Read the settings from all their sources; a later one wins (see the module's docstring).

    Touches no directory that a setting names.

    Args:
        extra: vLLM's ``ec_connector_extra_config``; keys plain or with ``ec_``.
        config_file: Path of LMCache's YAML file; the ``LMCACHE_CONFIG_FILE`` variable if None.
        environ: Environment variables; those of this process if None.

    Raises:
        ConfigError: The file cannot be used, a value in effect is not accepted, or two spellings
            of one source disagree. The message names the setting, its value and its source.
    """
    if environ is None:
        environ = os.environ
    path = config_file or environ.get(CONFIG_FILE_VARIABLE)
    document = _read_yaml(path) if path else {}
    found = {key: (document[key], f"{key} in {path}") for key in SETTINGS if key in document}
    for key in SETTINGS:
        variable = _BASE_PREFIX + key.upper()
        if variable in environ:
            found[key] = (_unquote(environ[variable]), variable)
    for layer in (_yaml_ec(document, path), _environ_ec(environ), _extra_ec(extra or {})):
        found |= _with_effect(layer)

    values: dict[str, Any] = {}
    sources = dict.fromkeys(SETTINGS, "default")
    for key, (value, source) in found.items():
        parsed = _parse(key, value, source)
        if parsed is not None:
            values[key] = parsed
            sources[key] = source
    if not values.get("local_cpu", True):
        logger.info(
            "local_cpu = False (from %s) is turned on: every byte of the encoder cache moves "
            "through its memory tier; size it with max_local_cpu_size",
            sources["local_cpu"],
        )
        del values["local_cpu"]
        sources["local_cpu"] = "default"
    if "max_local_disk_size" in values and "local_disk" not in values:
        logger.info(
            "max_local_disk_size (from %s) has no effect without local_disk",
            sources["max_local_disk_size"],
        )
    return ECEngineConfig(**values, sources=sources)


def _parse(key: str, value: object, source: str) -> object:
    if value is None:  # an empty value in YAML, null in JSON
        return None
    setting = SETTINGS[key]
    try:
        return setting.parse(value)
    except (ValueError, OverflowError):
        raise ConfigError(
            f"{key} = {_shown(value)} (from {source}) is not accepted; give {setting.accepts}"
        ) from None


def _with_effect(layer: Iterable[_Found]) -> dict[str, tuple[object, str]]:
    """Keep the keys that have an effect, log the others, refuse contradictions."""
    kept: dict[str, tuple[object, str]] = {}
    for key, value, source in layer:
        if key not in SETTINGS:
            _log_without_effect(key, value, source)
            continue
        earlier, earlier_source = kept.setdefault(key, (value, source))
        if earlier != value:
            raise ConfigError(
                f"{key} is set twice: {_shown(earlier)} (from {earlier_source}) and "
                f"{_shown(value)} (from {source}); remove one"
            )
    return kept


def _log_without_effect(key: str, value: object, source: str) -> None:
    # Values stay out of the log: what we do not know may be a password.
    if key == "remote_url" and value:
        logger.warning(
            "remote_url (from %s) has no effect on the encoder cache: remotes are not part of "
            "this version; remove it, and use local_disk to keep entries over restarts",
            source,
        )
    elif key in LMCACHE_KEYS:
        logger.info("%s (from %s) has no effect on the encoder cache", key, source)
    else:
        nearest = difflib.get_close_matches(key, sorted(SETTINGS.keys() | LMCACHE_KEYS), n=1)
        logger.warning(
            "%r (from %s) is not a setting of the encoder cache and is ignored%s",
            key,
            source,
            f"; did you mean {nearest[0]!r}?" if nearest else "",
        )


def _yaml_ec(document: Mapping[object, object], path: str | None) -> Iterator[_Found]:
    for name, value in document.items():
        key = str(name).lower()
        if key.startswith(_EC_PREFIX):
            yield key.removeprefix(_EC_PREFIX), value, f"{name} in {path}"
        elif key == "ec" and isinstance(value, dict):
            for nested, nested_value in value.items():
                yield str(nested).lower(), nested_value, f"ec: map of {path}"
        elif key == "ec" and value is not None:
            raise ConfigError(
                f"{name} = {_shown(value)} in {path} is not a map; write the encoder cache's "
                "settings below it, one `key: value` a line"
            )


def _environ_ec(environ: Mapping[str, str]) -> Iterator[_Found]:
    for name, value in environ.items():
        if name.startswith(_EC_VARIABLE_PREFIX):
            yield name.removeprefix(_EC_VARIABLE_PREFIX).lower(), _unquote(value), name


def _extra_ec(extra: Mapping[str, object]) -> Iterator[_Found]:
    for name, value in extra.items():
        yield name.lower().removeprefix(_EC_PREFIX), value, EXTRA_SOURCE


def _read_yaml(path: str) -> dict[object, object]:
    remedy = f"correct the file, or the path in {CONFIG_FILE_VARIABLE}"
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - the path stays as it was given
            document = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(
            f"LMCache's configuration file {path} cannot be read ({error.strerror}); {remedy}"
        ) from error
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(
            f"LMCache's configuration file {path} is not YAML ({error.problem}{line}); {remedy}"
        ) from error
    # ReaderError, a date or number that Python cannot hold, endless nesting.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"LMCache's configuration file {path} is not YAML ({type(error).__name__}); {remedy}"
        ) from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(
            f"LMCache's configuration file {path} holds a {type(document).__name__}, not a map "
            f"of settings; {remedy}"
        )
    return document


def _unquote(text: str) -> str:
    # Quotes in a variable are seldom meant (container runtimes keep them); LMCache drops them too.
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if quoted else text


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"
