"""Data sets by public name, where the hub can be reached and where it cannot. Nothing is downloaded."""

from __future__ import annotations

import copy
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tailopt.tasks import hub

datasets = pytest.importorskip("datasets", reason="the studies' extra is not installed")
constants = pytest.importorskip("huggingface_hub").constants


@pytest.fixture(autouse=True)
def _asked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Each test finds out for itself whether the hub can be reached, and has a cache of its own."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")] + ["HF_HUB_OFFLINE"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    probe = hub.is_reachable  # a test may put another function into its place
    probe.cache_clear()
    yield
    probe.cache_clear()


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's address is a port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")


def settings() -> dict[str, Any]:
    """Everything that can be set in the two packages."""
    return {
        f"{module.__name__}.{name}": copy.copy(value)
        for module in (datasets.config, constants)
        for name, value in vars(module).items()
        if name.isupper()
    }


def download(folder: Path, name: str, configuration: str, rows: dict[str, list[Any]]) -> None:
    """Put a data set where `datasets` puts one that it has downloaded."""
    module = pytest.importorskip("datasets.packaged_modules.parquet.parquet")
    datasets.Dataset.from_dict(rows).to_parquet(folder / "train.parquet")
    files = {"train": [str(folder / "train.parquet")]}
    short = name.split("/")[-1]
    builder = module.Parquet(dataset_name=short, config_name=configuration, hash="0" * 8, data_files=files)
    builder.download_and_prepare()
    place = Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___") / configuration / "0.0.0" / ("0" * 8)
    place.parent.mkdir(parents=True)
    Path(builder.cache_dir).rename(place)


@pytest.mark.usefixtures("unreachable")
def test_an_unreachable_hub_ends_soon_with_a_remedy_and_changes_no_package() -> None:
    before, start = settings(), time.monotonic()
    with pytest.raises(
        OSError, match=r"Cannot get the data set 'nobody/has-it' from the hub: it cannot be reached, and"
    ) as e:
        hub.dataset("nobody/has-it", split="train")
    assert str(e.value).endswith("Give the files themselves: --data PATH.")
    assert time.monotonic() - start < 20  # half a minute, and longer, where the packages are left to find out
    assert settings() == before


@pytest.mark.usefixtures("unreachable")
def test_what_was_downloaded_before_is_read_without_the_hub(tmp_path: Path) -> None:
    download(tmp_path, "somebody/has-it", "en-de", {"text": ["a", "b"]})
    before = settings()
    assert list(hub.dataset("somebody/has-it", "en-de", split="train", revision="main")["text"]) == ["a", "b"]
    with pytest.raises(OSError, match=r"no download from before \(.*config 'en-fr'; Available configs .*en-de"):
        hub.dataset("somebody/has-it", "en-fr", split="train")
    with pytest.raises(OSError, match=r"Cannot get the data set 'somebody/has-it' from the hub: .*test"):
        hub.dataset("somebody/has-it", "en-de", split="test")
    assert settings() == before


def test_a_reachable_hub_is_asked_by_datasets_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(hub, "is_reachable", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: asked.append((names, options)))
    hub.dataset("somebody/has-it", "en-de", split="train", revision="main")
    assert asked == [(("somebody/has-it", "en-de"), {"split": "train", "revision": "main"})]


def test_reachability_is_one_connection_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert hub.is_reachable() and hub.is_reachable()
        server.accept()[0].close()
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.usefixtures("unreachable")
def test_the_environment_decides_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "localhost")  # names no proxy
    assert not hub.is_reachable()
    hub.is_reachable.cache_clear()
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")  # behind a proxy only the packages can tell
    assert hub.is_reachable()
    hub.is_reachable.cache_clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not hub.is_reachable()
