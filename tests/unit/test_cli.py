from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

from lmcache_ec.cli.main import main
from lmcache_ec.config import SETTINGS


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LMCACHE_")]:
        monkeypatch.delenv(name)


def shell(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = Path(sysconfig.get_path("scripts")) / "lmcache-ec"
    return subprocess.run([script, *arguments], capture_output=True, text=True, check=False)


def test_config_prints_an_aligned_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text("cache_policy: fifo\n")
    monkeypatch.setenv("LMCACHE_EC_MAX_QUEUE_SIZE", "2")
    assignments = ["--set", "local_disk=/data/ec", "--set", "ec_namespace=a=b c"]
    assert main(["config", "--config-file", str(file), *assignments]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    starts = [head.index(column) for column in ("KEY", "VALUE", "SOURCE")]
    table = {}
    for line in lines:
        ends = [*starts[1:], len(line)]
        key, value, source = (line[a:b] for a, b in zip(starts, ends, strict=True))
        assert key.endswith("  ")
        assert value.endswith("  ")
        table[key.strip()] = (value.strip(), source)
    assert list(table) == list(SETTINGS)
    assert table["cache_policy"] == ('"FIFO"', f"cache_policy in {file}")
    assert table["max_queue_size"] == ("2.0", "LMCACHE_EC_MAX_QUEUE_SIZE")
    assert table["local_disk"] == ('"/data/ec"', "ec_connector_extra_config")
    assert table["namespace"] == ('"a=b c"', "ec_connector_extra_config")
    assert table["local_cpu"] == ("true", "default")


def test_refused_setting_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--set", "max_queue_size=lots"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert re.fullmatch(r"lmcache-ec: max_queue_size = 'lots' [^\n]*\n", output.err)


def test_status_reaches_the_shell() -> None:
    refused = shell("config", "--set", "epoch=" + "x" * 300)
    assert refused.returncode == 2
    assert refused.stderr.startswith("lmcache-ec: epoch = ")
    assert refused.stderr.count("\n") == 1
    accepted = shell("config", "--set", "epoch=2", "--set", "epock=3")
    assert accepted.returncode == 0
    assert "'epock'" in accepted.stderr
    assert "did you mean 'epoch'?" in accepted.stderr


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"lmcache-ec {importlib.metadata.version('lmcache-ec')}\n"


@pytest.mark.parametrize(
    "arguments", [[], ["no-such-command"], ["config", "--set", "epoch"], ["config", "--set", "=1"]]
)
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: lmcache-ec" in capsys.readouterr().err


def test_help_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["config", "--help"])
    output = capsys.readouterr().out
    for key, setting in SETTINGS.items():
        assert key in output
        assert setting.help in output
