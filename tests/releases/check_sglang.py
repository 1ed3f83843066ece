"""What docs/integrating/sglang.md says of the released SGLang: `make test-sglang`.

On a CPU, from the wheel's Python files alone. The plug-in loader and its registry are imported and
used; the GDN backend, which needs the compiled parts, is read.
"""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from helpers.absent_packages import make_up

RELEASE = os.environ.get("SGLANG_RELEASE", "")
ABSENT = ["IPython", "aiohttp", "msgspec", "orjson", "psutil", "pybase64", "requests", "zmq"]
BACKEND = "sglang/srt/layers/attention/linear/gdn_backend.py"

assert RELEASE, "SGLANG_RELEASE: expected the folder of the wheel's files (make test-sglang)"
sys.path.insert(0, RELEASE)
make_up(ABSENT)

from sglang.srt import plugins  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: E402


def classes() -> dict[str, ast.ClassDef]:
    """Return the classes of the GDN backend."""
    tree = ast.parse((Path(RELEASE) / BACKEND).read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def method(owner: ast.ClassDef, name: str) -> ast.FunctionDef:
    """Return a method of a class."""
    [found] = [n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name == name]
    return found


def test_plug_ins_are_found_by_entry_point() -> None:
    assert plugins.GENERAL_PLUGINS_GROUP == "sglang.srt.plugins"


def test_a_class_is_replaced_wherever_it_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dispatcher:
        def target_verify(self) -> str:
            return "theirs"

    class Ring(Dispatcher):
        def target_verify(self) -> str:
            return "ours"

    home, user = ModuleType("engine_backend"), ModuleType("engine_user")
    for module in (home, user):
        module.Dispatcher = Dispatcher
        monkeypatch.setitem(sys.modules, module.__name__, module)
    HookRegistry.reset()
    for _ in range(2):  # a process may do so more than once
        HookRegistry.register("engine_backend.Dispatcher", Ring, HookType.REPLACE)
        HookRegistry.apply_hooks()
    assert home.Dispatcher().target_verify() == user.Dispatcher().target_verify() == "ours"
    HookRegistry.reset()


def test_the_dispatcher() -> None:
    dispatcher = classes()["GDNKernelDispatcher"]
    made = method(dispatcher, "__init__").args
    assert [a.arg for a in made.args] == [
        "self", "decode_backend", "prefill_backend", "verify_backend",
    ]  # fmt: skip
    verify = method(dispatcher, "target_verify").args
    assert [a.arg for a in verify.args][1:] == ["A_log", "dt_bias", "q", "k", "v", "a", "b"]
    keywords = [a.arg for a in verify.kwonlyargs]
    assert keywords == ["ssm_states", "cache_indices", "query_start_loc"]
    assert verify.kwarg is not None


def test_the_backend_creates_it_by_name() -> None:
    """So that a replacement takes effect."""
    calls = ast.walk(method(classes()["GDNAttnBackend"], "__init__"))
    names = [n.func.id for n in calls if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    assert "GDNKernelDispatcher" in names


def test_the_ring_has_keys_of_its_own() -> None:
    verify = method(classes()["GDNAttnBackend"], "_replayssm_target_verify")
    names = {a.arg for a in verify.args.kwonlyargs}
    assert {"cache_indices", "replay_indices"} <= names
    fields = (Path(RELEASE) / "sglang/srt/arg_groups/fields/exec_.py").read_text(encoding="utf-8")
    assert "enable_linear_replayssm_spec:" in fields
