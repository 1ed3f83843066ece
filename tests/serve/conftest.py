"""A running server on loopback, with the bundled model and a chat template."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.serving import TEMPLATE, Running
from hybridspec import LLM
from hybridspec.bundled import bundled_model_path
from hybridspec.serve.options import ServeOptions


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with a chat template, and a pad of special tokens as it has them."""
    path = tmp_path_factory.mktemp("served") / "model"
    shutil.copytree(bundled_model_path(), path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="session")
def running(folder: Path) -> Iterator[Running]:
    options = ServeOptions(model_name="small", max_requests=80, drain_s=5)
    server = Running(lambda: LLM(folder, device="cpu"), options)
    yield server
    server.end()
