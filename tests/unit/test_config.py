from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path

import pytest

from lmcache_ec.config import LMCACHE_KEYS, SETTINGS, ECEngineConfig, load_ec_engine_config
from lmcache_ec.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs" / "configuration.md"


def load(
    extra: dict[str, object] | None = None,
    environ: dict[str, str] | None = None,
    file: Path | None = None,
) -> ECEngineConfig:
    return load_ec_engine_config(
        extra, config_file=str(file) if file else None, environ=environ or {}
    )


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "lmcache.yaml"
    path.write_text(text)
    return path


def records(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(record.levelno, record.getMessage()) for record in caplog.records]


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="lmcache_ec")


def test_defaults(caplog: pytest.LogCaptureFixture) -> None:
    config = load()
    assert config == ECEngineConfig()
    assert (config.local_cpu, config.local_disk, config.cache_policy) == (True, None, "LRU")
    assert config.max_local_cpu_bytes == 1 << 30
    assert config.max_local_disk_bytes == 64 << 30
    assert config.max_queue_bytes == 1 << 28
    assert (config.namespace, config.epoch, config.shm_path) == ("", "", "/dev/shm")
    assert (config.prefetch_timeout_ms, config.cache_client_uuids) == (100, False)
    assert config.sources == dict.fromkeys(SETTINGS, "default")
    assert not records(caplog)


def test_each_source_beats_the_earlier_ones(tmp_path: Path) -> None:
    plain, nested = "max_local_cpu_size: 2\n", "ec: {max_local_cpu_size: 4}\n"
    file = write(tmp_path, plain)
    assert load(file=file).max_local_cpu_size == 2
    assert load(file=file).sources["max_local_cpu_size"] == f"max_local_cpu_size in {file}"

    environ = {"LMCACHE_MAX_LOCAL_CPU_SIZE": "3"}
    config = load(environ=environ, file=file)
    assert config.max_local_cpu_size == 3
    assert config.sources["max_local_cpu_size"] == "LMCACHE_MAX_LOCAL_CPU_SIZE"

    file = write(tmp_path, plain + nested)
    config = load(environ=environ, file=file)
    assert config.max_local_cpu_size == 4
    assert config.sources["max_local_cpu_size"] == f"ec: map of {file}"
    file = write(tmp_path, plain + "ec_max_local_cpu_size: 4.5\n")
    config = load(environ=environ, file=file)
    assert config.max_local_cpu_size == 4.5
    assert config.sources["max_local_cpu_size"] == f"ec_max_local_cpu_size in {file}"

    environ["LMCACHE_EC_MAX_LOCAL_CPU_SIZE"] = "5"
    config = load(environ=environ, file=file)
    assert config.max_local_cpu_size == 5
    assert config.sources["max_local_cpu_size"] == "LMCACHE_EC_MAX_LOCAL_CPU_SIZE"

    for name in ("max_local_cpu_size", "ec_max_local_cpu_size"):
        config = load({name: 6}, environ, file)
        assert config.max_local_cpu_size == 6
        assert config.sources["max_local_cpu_size"] == "ec_connector_extra_config"
    assert config.sources["local_disk"] == "default"


def test_file_and_variables_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("LMCACHE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(write(tmp_path, "cache_policy: fifo")))
    monkeypatch.setenv("LMCACHE_EC_EPOCH", "7")
    config = load_ec_engine_config()
    assert (config.cache_policy, config.epoch) == ("FIFO", "7")
    other = tmp_path / "other.yaml"
    other.write_text("cache_policy: MRU")
    assert load_ec_engine_config(config_file=str(other)).cache_policy == "MRU"


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("max_local_cpu_size", "0.5", 0.5),
        ("max_local_cpu_size", 0, 1.0),
        ("max_local_cpu_size", "-1", 1.0),
        ("max_local_cpu_size", None, 1.0),
        ("max_local_disk_size", 10, 10.0),
        ("max_local_disk_size", 0.0, 64.0),
        ("local_disk", "/data/ec/", "/data/ec"),
        ("local_disk", "file:///data/ec/", "/data/ec"),
        ("local_disk", "~/ec", os.path.expanduser("~/ec")),  # noqa: PTH111
        ("local_disk", "ec", str(Path.cwd() / "ec")),
        ("local_disk", "", None),
        ("local_disk", None, None),
        ("cache_policy", "lfu", "LFU"),
        ("namespace", "tenant a", "tenant a"),
        ("epoch", 2, "2"),
        ("shm_path", "/run/shm/", "/run/shm"),
        ("prefetch_timeout_ms", "0", 0),
        ("prefetch_timeout_ms", 250, 250),
        ("max_queue_size", 1, 1.0),
        ("cache_client_uuids", "false", False),
        ("cache_client_uuids", "True", True),
        ("cache_client_uuids", "on", True),
        ("cache_client_uuids", 0, False),
    ],
)
def test_accepted_values(key: str, written: object, value: object) -> None:
    result = getattr(load({key: written}), key)
    assert result == value
    assert type(result) is type(value)


NOT_SIZES = ("nan", float("inf"), "-inf", "1e300", 10**400, 1e-12, True, False, "1 GiB", "", [1])
REFUSED: dict[str, tuple[object, ...]] = {
    "local_cpu": ("maybe", 2),
    "max_local_cpu_size": NOT_SIZES,
    "local_disk": ("/a,/b", "s3://bucket", "/a\0b", 5, True, "file://", "~no-such-user/ec"),
    "max_local_disk_size": NOT_SIZES,
    "cache_policy": ("ARC", "", 1, True),
    "namespace": (1.5, True, [], "x" * 257),
    "epoch": (1.5, True, [], "x" * 257),
    "shm_path": ("", "/a,/b", 5),
    "prefetch_timeout_ms": (-1, 1.5, "1.5", True, "soon", 10**400, [], "9" * 5000),
    "max_queue_size": (*NOT_SIZES, 0, -1, "0"),
    "cache_client_uuids": ("maybe", 2, 1.0, "", []),
}


@pytest.mark.parametrize(
    ("key", "written"), [(key, value) for key, values in REFUSED.items() for value in values]
)
def test_refused_values_name_key_value_and_source(key: str, written: object) -> None:
    with pytest.raises(ConfigError) as caught:
        load({key: written})
    message = str(caught.value)
    shown = repr(written)[:80]
    assert f"{key} = {shown}" in message
    assert "(from ec_connector_extra_config)" in message
    assert SETTINGS[key].accepts in message
    assert "\n" not in message
    assert len(message) < 400


def test_refused_value_of_every_source(tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    for text, source in (
        ("max_queue_size: a", f"max_queue_size in {file}"),
        ("ec_max_queue_size: a", f"ec_max_queue_size in {file}"),
        ("ec:\n  max_queue_size: a", f"ec: map of {file}"),
    ):
        write(tmp_path, text)
        with pytest.raises(ConfigError, match=re.escape(f"max_queue_size = 'a' (from {source})")):
            load(file=file)
    for name in ("LMCACHE_MAX_QUEUE_SIZE", "LMCACHE_EC_MAX_QUEUE_SIZE"):
        with pytest.raises(ConfigError, match=re.escape(f"max_queue_size = 'a' (from {name})")):
            load(environ={name: "a"})


def test_kv_caches_list_of_directories_may_be_replaced(tmp_path: Path) -> None:
    file = write(tmp_path, "local_disk: /a,/b")
    with pytest.raises(ConfigError, match="set ec_local_disk to one"):
        load(file=file)
    assert load({"local_disk": "/a/ec"}, file=file).local_disk == "/a/ec"
    config = load({"local_disk": None}, file=file)
    assert (config.local_disk, config.sources["local_disk"]) == (None, "default")


def test_quotes_around_a_variable_are_dropped() -> None:
    environ = {"LMCACHE_LOCAL_DISK": '"file:///kv"', "LMCACHE_EC_NAMESPACE": "'a'"}
    config = load(environ=environ)
    assert (config.local_disk, config.namespace) == ("/kv", "a")


@pytest.mark.parametrize("written", [False, "false", 0])
def test_local_cpu_is_always_on(written: object, caplog: pytest.LogCaptureFixture) -> None:
    config = load({"local_cpu": written})
    assert config.local_cpu is True
    assert config.sources["local_cpu"] == "default"
    [(level, message)] = records(caplog)
    assert level == logging.INFO
    assert "local_cpu" in message
    assert "ec_connector_extra_config" in message


def test_disk_size_without_disk_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    load({"max_local_disk_size": 5, "local_disk": "/a"})
    assert not records(caplog)
    load({"max_local_disk_size": 5})
    [(level, message)] = records(caplog)
    assert level == logging.INFO
    assert "without local_disk" in message


@pytest.mark.parametrize("key", ["chunk_size", "extra_config", "enable_xpyd", "nixl_peer_port"])
def test_lmcache_keys_without_effect(
    key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert key in LMCACHE_KEYS
    file = write(tmp_path, f"{key}: 1\n")
    assert load(environ={f"LMCACHE_{key.upper()}": "1"}, file=file) == ECEngineConfig()
    assert not records(caplog)

    file = write(tmp_path, f"ec_{key}: 1\nec: {{{key}: 1}}\n")
    variable = f"LMCACHE_EC_{key.upper()}"
    assert load({key: 1}, {variable: "1"}, file) == ECEngineConfig()
    assert records(caplog) == [
        (logging.INFO, f"{key} (from {source}) has no effect on the encoder cache")
        for source in (
            f"ec_{key} in {file}",
            f"ec: map of {file}",
            variable,
            "ec_connector_extra_config",
        )
    ]


def test_remotes_are_a_warning_in_ec_spelling_only(caplog: pytest.LogCaptureFixture) -> None:
    load(environ={"LMCACHE_REMOTE_URL": "redis://u:pa55@host"})
    assert not records(caplog)
    load(environ={"LMCACHE_EC_REMOTE_URL": "redis://u:pa55@host"})
    [(level, message)] = records(caplog)
    assert level == logging.WARNING
    assert "remotes are not part of this version" in message
    assert "LMCACHE_EC_REMOTE_URL" in message
    assert "pa55" not in message


def test_unknown_ec_keys_are_dropped_with_the_nearest_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path, "ec_local_dsk: /a\nec: {max_cpu_size: 2, 1: x}\n")
    environ = {"LMCACHE_EC_CACHE_POLICE": "LRU", "LMCACHE_EC_": "x"}
    assert load({"redis_password": "pa55"}, environ, file) == ECEngineConfig()
    assert {level for level, _ in records(caplog)} == {logging.WARNING}
    messages = [message for _, message in records(caplog)]
    for key, source, nearest in (
        ("local_dsk", f"ec_local_dsk in {file}", "local_disk"),
        ("max_cpu_size", f"ec: map of {file}", "max_local_cpu_size"),
        ("cache_police", "LMCACHE_EC_CACHE_POLICE", "cache_policy"),
    ):
        [message] = [message for message in messages if f"'{key}' (from {source})" in message]
        assert message.endswith(f"did you mean '{nearest}'?")
    assert any("'redis_password' (from ec_connector_extra_config)" in m for m in messages)
    assert not any("pa55" in message for message in messages)
    assert len(messages) == 6


def test_what_belongs_to_others_is_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write(tmp_path, "somebody_elses: 1\n2: x\nec:\n")
    environ = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "DEBUG", "LMCACHE_NEW": "1"}
    assert load(environ=environ, file=file) == ECEngineConfig()
    assert not records(caplog)


def test_two_spellings_of_one_source_must_agree(tmp_path: Path) -> None:
    file = write(tmp_path, "ec_epoch: a\nec: {epoch: a}\n")
    assert load(file=file).epoch == "a"
    file = write(tmp_path, "ec_epoch: a\nec: {epoch: b}\n")
    with pytest.raises(ConfigError, match=r"epoch is set twice: 'a' .*ec_epoch in .*'b' .*ec: map"):
        load(file=file)
    with pytest.raises(ConfigError, match="epoch is set twice"):
        load({"epoch": "a", "ec_epoch": "b"})


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"a: [1, 2", "line 1"),
        (b"a: 1\n b: 2\n", "line 2"),
        (b"\xff\xfe\xfd", "not YAML"),
        (b"a: 2026-13-45", "not YAML"),
        (b"[" * 5000, "not YAML"),
        (b"- 1\n- 2\n", "holds a list"),
        (b"just text", "holds a str"),
        (b"false", "holds a bool"),
        (b"ec: 5", "not a map"),
        (b"!!python/object/apply:os.getcwd []", "not YAML"),
    ],
)
def test_unusable_files(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=reason) as caught:
        load(file=file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    for file in (tmp_path / "absent.yaml", tmp_path):
        with pytest.raises(ConfigError, match=re.escape(str(file))):
            load(file=file)
        with pytest.raises(ConfigError, match="LMCACHE_CONFIG_FILE"):
            load(environ={"LMCACHE_CONFIG_FILE": str(file)})


def test_empty_file_is_no_setting(tmp_path: Path) -> None:
    assert load(file=write(tmp_path, "# nothing\n")) == ECEngineConfig()


def test_docs_name_every_key_and_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", DOCS.read_text(), re.MULTILINE)
    assert rows == [(key, json.dumps(setting.default)) for key, setting in SETTINGS.items()]
