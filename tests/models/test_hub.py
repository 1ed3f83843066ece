"""Models by the id of a repository, from a stand-in for the hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.helpers.hub_server import serve_hub
from tests.helpers.tiny_checkpoints import build_tiny_checkpoint

from hybridspec.errors import CheckpointError
from hybridspec.models.hub import find_model

FIND = """
import json, sys
from hybridspec.errors import CheckpointError
from hybridspec.models.hub import find_model

for arguments in json.loads(sys.argv[1]):
    try:
        print(find_model(**arguments))
    except CheckpointError as error:
        print("CheckpointError", error)
"""
INDEX = "model.safetensors.index.json"


def find(url: str, cache: Path, *calls: dict[str, object]) -> list[str]:
    """Call `find_model` in a process whose hub is at `url`; returns folders and messages."""
    done = subprocess.run(
        [sys.executable, "-c", FIND, json.dumps(calls)],
        env={**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in shards, with files beside it that nobody asked for."""
    folder = build_tiny_checkpoint(tmp_path_factory.mktemp("hub") / "m", num_shards=2).folder
    for name in ("README.md", "pytorch_model.bin", "consolidated.safetensors"):
        (folder / name).write_text("x")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("{}")
    return folder


def test_downloads_what_is_read_and_nothing_else(sharded: Path, tmp_path: Path) -> None:
    shards = sorted(set(json.loads((sharded / INDEX).read_text())["weight_map"].values()))
    with serve_hub({"someone/tiny": sharded}) as hub:
        [first, second] = find(hub.url, tmp_path, *[{"model": "someone/tiny"}] * 2)
    assert sorted(hub.fetched) == sorted(["config.json", "generation_config.json", INDEX, *shards])
    assert first == second
    for name in hub.fetched:
        assert (Path(first) / name).read_bytes() == (sharded / name).read_bytes()
    # The server is gone: what was downloaded is still there, and the rest is one message.
    [again, missing] = find(hub.url, tmp_path, {"model": "someone/tiny"}, {"model": "a/b"})
    assert again == first
    assert missing == (
        "CheckpointError a/b: no such path here, and from the Hugging Face hub: the hub cannot be "
        "reached, and its cache does not hold the whole model"
    )


def test_part_of_a_repository(sharded: Path, tmp_path: Path) -> None:
    with serve_hub({"someone/tiny": sharded}) as hub:
        [head] = find(hub.url, tmp_path / "a", {"model": "someone/tiny", "only": "mtp."})
        fetched, hub.fetched = hub.fetched, []
        [bare] = find(hub.url, tmp_path / "b", {"model": "someone/tiny", "has_weights": False})
    assert [name for name in fetched if name.endswith(".safetensors")] == ["mtp.safetensors"]
    assert (Path(head) / "mtp.safetensors").is_file()
    assert [name for name in hub.fetched if name.endswith(".safetensors")] == []
    assert (Path(bare) / "config.json").is_file()
    # Cached descriptions alone are not a model when there is no hub.
    [half] = find(hub.url, tmp_path / "b", {"model": "someone/tiny"})
    assert half.startswith("CheckpointError someone/tiny: no such path here")


def test_a_single_file(tmp_path: Path) -> None:
    folder = build_tiny_checkpoint(tmp_path / "m", has_mtp=False).folder
    with serve_hub({"someone/tiny": folder}) as hub:
        [found] = find(hub.url, tmp_path / "cache", {"model": "someone/tiny"})
    assert sorted(path.name for path in Path(found).iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


def test_what_the_hub_does_not_give(tmp_path: Path) -> None:
    with serve_hub({"someone/gated": None}) as hub:
        answers = find(hub.url, tmp_path, {"model": "someone/gated"}, {"model": "someone/else"})
    assert answers == [
        "CheckpointError someone/gated: no such path here, and from the Hugging Face hub: its "
        "owner gives it out on request only; ask there, then `hf auth login`",
        "CheckpointError someone/else: no such path here, and from the Hugging Face hub: no such "
        "repository, or a private one",
    ]


def test_a_revision(tmp_path: Path) -> None:
    folder = build_tiny_checkpoint(tmp_path / "m", has_mtp=False).folder
    calls = [{"model": "someone/tiny", "revision": name} for name in ("v2", "v3")]
    with serve_hub({"someone/tiny": folder}) as hub:
        [found, missing] = find(hub.url, tmp_path / "cache", *calls)
    assert (Path(found) / "model.safetensors").is_file()
    assert set(hub.revisions) == {"v2"}
    assert missing == (
        "CheckpointError someone/tiny: no such path here, and from the Hugging Face hub: no such "
        "revision of it"
    )
    with pytest.raises(ValueError, match="^revision: expected an id on the hub with it, got '/"):
        find_model(folder, revision="v2")


@pytest.mark.parametrize("kind", [str, Path])
def test_names_that_no_file_can_have(kind: type) -> None:
    for name, reason in (("x" * 5000, "File name too long"), ("a\0b", "embedded null byte")):
        with pytest.raises(CheckpointError, match=f"^model: '.*: {reason}$") as error:
            find_model(kind(name))
        assert len(str(error.value)) < 300


def test_paths_are_never_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", None, raising=False)
    assert find_model("owner/name") == Path("owner/name")
    for text in ("/no/such/folder", "./no/such", "no_slash", "a/b/c", "~/models", "../x/y"):
        assert find_model(text) == Path(text)
    assert find_model(Path("owner/absent")) == Path("owner/absent")
