"""Real vLLM for the tests of this folder: tiny models, servers, in-process engines.

A test asks for ``reference`` before it opens an engine, since engines of one process cannot
overlap.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from lmcache_ec.testing import vllm_site
from lmcache_ec.testing.tiny_models import make_tiny_model
from lmcache_ec.testing.vllm_server import (
    ENVIRONMENT,
    InProcessLLM,
    VLLMServer,
    in_process_llm,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

# Both must be there before any test module imports vLLM.
vllm_site.activate()
os.environ.update(ENVIRONMENT)
# vLLM looks into a model's class in a child process.
os.environ["PYTHONPATH"] = vllm_site.child_pythonpath()

# `tests/vllm` itself may be found as a namespace package of this name, which has no origin.
_SPEC = importlib.util.find_spec("vllm")
_HAS_VLLM = _SPEC is not None and _SPEC.origin is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder, and skip it where there is no vLLM to run."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            # What vLLM and its libraries warn of is theirs; our own warnings stay errors.
            item.add_marker(pytest.mark.filterwarnings("ignore", "error:::lmcache_ec"))
            if not _HAS_VLLM:
                item.add_marker(pytest.mark.skip(reason="vLLM is missing; `make test` installs it"))


class StartServer(Protocol):
    """Starts a server of a tiny model, which ends with the test; see ``VLLMServer``."""

    def __call__(self, model: str, **options: Any) -> VLLMServer: ...


class OpenEngine(Protocol):
    """Opens an engine of a tiny model in this process, for a ``with``; see ``in_process_llm``."""

    def __call__(
        self, model: str, ec: Mapping[str, Any] | None = None, **options: Any
    ) -> AbstractContextManager[InProcessLLM]: ...


class Reference(Protocol):
    """Tokens that an engine without a connector generates; arguments as of ``generate``."""

    def __call__(
        self, model: str, text: str, images: Sequence[bytes] = (), **options: Any
    ) -> list[int]: ...


@pytest.fixture(autouse=True)
def memory_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Home of the test's own memory tier; no setting of the caller's environment is left."""
    for name in os.environ:
        if name.startswith("LMCACHE_"):
            monkeypatch.delenv(name)
    with tempfile.TemporaryDirectory(prefix="lmcache-ec-test-", dir="/dev/shm") as directory:
        monkeypatch.setenv("LMCACHE_EC_SHM_PATH", directory)
        yield Path(directory)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of a tiny model by its name, built once a session."""
    built: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if name not in built:
            built[name] = make_tiny_model(name, tmp_path_factory.mktemp(name))
        return built[name]

    return directory


@pytest.fixture
def start_server(model_dir: Callable[[str], Path], tmp_path: Path) -> Iterator[StartServer]:
    """Factory of servers; each writes its log under ``tmp_path``."""
    with ExitStack() as servers:
        logs = (tmp_path / f"server-{number}.log" for number in range(1000))

        def start(model: str, **options: Any) -> VLLMServer:
            return servers.enter_context(VLLMServer(model_dir(model), next(logs), **options))

        yield start


@pytest.fixture(scope="session")
def open_engine(model_dir: Callable[[str], Path]) -> OpenEngine:
    """Factory of engines in this process."""

    def open_one(
        model: str, ec: Mapping[str, Any] | None = None, **options: Any
    ) -> AbstractContextManager[InProcessLLM]:
        return in_process_llm(model_dir(model), ec, **options)

    return open_one


@pytest.fixture(scope="session")
def reference(open_engine: OpenEngine) -> Reference:
    """What the model answers without a connector, remembered for the session."""
    known: dict[object, list[int]] = {}

    def tokens(model: str, text: str, images: Sequence[bytes] = (), **options: Any) -> list[int]:
        request = (model, text, tuple(images), repr(sorted(options.items())))
        if request not in known:
            with open_engine(model) as engine:
                known[request] = engine.generate(text, images, **options)
        return known[request]

    return tokens
