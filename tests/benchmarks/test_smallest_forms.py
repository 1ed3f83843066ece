"""Every benchmark and script runs, in its smallest form: on a CPU where it can, else on a GPU."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from helpers.scripts import ROOT, run_apart, run_here

ON_A_CPU: dict[str, list] = {
    "acceptance.py": ["--prompts", 1, "--max-tokens", 4],
    "cpu_generate.py": ["--prompts", 1, "--max-tokens", 2, "--rounds", 1],
    "dynamic_policy.py": ["--scale", 0.01, "--limit", 1],
    "dynamic_policy_engine.py": [
        *["--geometry", "bundled", "--device", "cpu", "--requests", 2, "--tokens", 32],
        *["--prompt", 4, "--rounds", 1, "--spreads", 0.5, "--mixed-tokens", 6],
    ],
    "engine_throughput.py": [
        "--geometry",
        "bundled",
        "--device",
        "cpu",
        "--requests",
        2,
        "--modes",
        "plain",
        "fixed",
        "budget",
        "--drafts",
        1,
        "--verify-rows",
        3,
        "--acceptance",
        0.7,
        "--prompt",
        8,
        "--tokens",
        12,
        "--rounds",
        1,
        "--skip",
        1,
    ],
    "exact_cost.py": [
        "--geometry",
        "bundled",
        "--device",
        "cpu",
        "--requests",
        2,
        "--drafts",
        1,
        "--acceptance",
        0.7,
        "--prompt",
        8,
        "--tokens",
        12,
        "--rounds",
        1,
    ],
    "fold_rules.py": ["--steps", 20],
    "gdn_8bit_forms.py": ["--first", "--tokens", 24],
    "prompts_under_load.py": [
        "--geometry",
        "bundled",
        "--device",
        "cpu",
        "--drafts",
        1,
        "--acceptance",
        0.7,
        "--decoding",
        2,
        "--long",
        600,
        "--rounds",
        1,
        "--sharing",
        2,
        "--shared",
        80,
    ],
    "serve_overhead.py": ["--streams", 2, "--max-tokens", 4, "--rounds", 1, "--one-core"],
    "tensor_cache.py": ["--devices", "cpu", "--rounds", 1, "--limit", 1],
}
ON_A_GPU: dict[str, list] = {
    "attention_parts.py": ["--iterations", 1, "--limit", 1],
    "attention_verify.py": ["--iters", 1, "--jobs", 1, "--limit", 1],
    "choose_tokens.py": ["--rows", 2, "--vocab", 5000, "--iterations", 1],
    "engine_throughput.py": [
        "--geometry",
        "bundled",
        "--requests",
        2,
        "--tokens",
        64,
        "--rounds",
        1,
        "--modes",
        "plain",
        "fixed",
    ],
    "exact_cost.py": ["--geometry", "bundled", "--requests", 2, "--tokens", 64, "--rounds", 1],
    "experts.py": ["--rows", 1, "--experts", 16, "--layers", 2, "--iterations", 1],
    "gdn_8bit_forms.py": ["--first", "--tokens", 24, "--device", "cuda"],
    "dynamic_policy_engine.py": [
        *["--geometry", "bundled", "--requests", 2, "--tokens", 32],
        *["--rounds", 1, "--spreads", 0.5, "--mixed-tokens", 8],
    ],
    "gdn_drift.py": ["--steps", 500, "--modes", "bf16", "raw_bf16"],
    "gdn_fold_order.py": ["--iterations", 1, "--limit", 1],
    "gdn_fold_stagger.py": ["--steps", 8, "--rounds", 1],
    "gdn_raw.py": ["--batch", 1, "--iters", 1],
    "gdn_verify.py": ["--batch", 1, "--iters", 1],
    "ordered_ops.py": ["--rows", 4, "--requests", 1, "--iterations", 1],
    "prefill_parts.py": ["--iterations", 1, "--limit", 2],
    "products.py": ["--rows", 4, "--shrink", 8, "--iterations", 1],
    "state_snapshots.py": ["--requests", 1, "--iterations", 1],
    "tensor_cache.py": ["--devices", "cuda", "--rounds", 1, "--limit", 1],
    "verify_plan.py": ["--limit", 2],
}
MANY_REQUESTS = ["--requests", 3, "--verify-rows", 6, "--draft-tokens", 2, "--max-tokens", 6]
# Run by the script of the same name, by tests/tools, or below.
ELSEWHERE = {"dynamic_verify.py", "gdn_8bit_model.py", "gdn_replayssm.py", "plots.py"}
# What the others import.
SHARED = {
    "floors.py",
    "geometries.py",
    "harness.py",
    "measured_commit.py",
    "spread.py",
    "step_parts.py",
    "transformers_engine.py",
}


def last_line(output: str) -> dict:
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize("name", ON_A_CPU)
def test_on_a_cpu(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last line is the result, which is also what goes into a file."""
    file = tmp_path / "result.json"
    run_here(f"benchmarks/{name}", *ON_A_CPU[name], "--json", file)
    result = last_line(capsys.readouterr().out)
    assert result["commit"] and result == json.loads(file.read_text())


@pytest.mark.parametrize("name", sorted(ON_A_GPU.keys() - ON_A_CPU.keys()))
def test_what_needs_a_gpu_says_how_it_is_called(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which at least imports everything that it uses."""
    run_here(f"benchmarks/{name}", "--help")
    assert capsys.readouterr().out.startswith(f"usage: {name}")


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ON_A_GPU)
def test_on_a_gpu(name: str, large_memory: None) -> None:
    assert last_line(run_apart(f"benchmarks/{name}", *ON_A_GPU[name]))["commit"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_dynamic_verification(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script takes every device that it sees, and fails where a token differs."""
    if device == "cpu":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    output = run_apart("scripts/dynamic_verify.sh", *MANY_REQUESTS)
    assert "tokens identical in 3 requests" in output
    result = last_line(output)
    assert result["device"].partition(":")[0] == device
    assert list(result["variants"]) == ["plain", "every draft", "chosen drafts"]


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_a_peer_that_differs_is_not_timed(
    factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer is this library's own functions, in a package where the fork has its kernels."""
    folder = tmp_path / "vllm/model_executor/layers/fla/ops"
    folder.mkdir(parents=True)
    names = {
        "gdn_replayssm_spec_decode": "gdn_replayssm_spec_decode",
        "fused_recurrent_replayssm": "fused_recurrent_gated_delta_rule_replayssm",
    }
    for module, name in names.items():
        (folder / f"{module}.py").write_text(
            "from hybridspec.compat import vllm as ours\n"
            f"def {name}(out, **rest):\n"
            f"    ours.{name}(out=out, **rest)\n"
            f"    out.mul_({factor})\n"
        )
    with monkeypatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            patch.delitem(sys.modules, name)
        words = ["--peer", tmp_path, "--batch", 2, "--share", 0, 0.5, "--iters", 1]
        if factor == 1.0:
            run_here("benchmarks/gdn_replayssm.py", *words)
        else:
            with pytest.raises(AssertionError, match="ReplaySSM: out wrong by"):
                run_here("benchmarks/gdn_replayssm.py", *words)
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]


def test_every_plot_is_drawn(tmp_path: Path) -> None:
    """From the committed results; beside them the documents show one that is drawn by hand."""
    run_here("benchmarks/plots.py", "--folder", tmp_path)
    drawn = {path.name for path in tmp_path.iterdir()}
    shown = {path.name for path in (ROOT / "docs/images").glob("*.svg")}
    assert drawn == shown - {"memory.svg"}
    assert all(path.stat().st_size > 5000 for path in tmp_path.iterdir())


def test_the_engines_plot_shows_the_modes_that_were_run() -> None:
    engine = runpy.run_path(str(ROOT / "benchmarks/plots.py"))["engine"]
    plain = [
        {"mode": "plain", "requests": count, "tokens_per_s": 200.0 * count} for count in (1, 32)
    ]
    fixed = [{"mode": "fixed", "requests": 32, "tokens_per_s": 9600.0}]
    figure = engine(plain + fixed)
    lines = {line.get_label(): list(line.get_ydata()) for line in figure.axes[1].lines}
    assert lines == {"plain decoding": [1.0, 1.0], "3 drafts, ring": [1.5]}
    assert engine(fixed) is None


SCRIPTS: dict[str, list] = {
    "random_requests.py": [
        "--requests",
        24,
        "--max-num-seqs",
        5,
        "--max-tokens",
        12,
        "--page-size",
        16,
        "--pages",
        33,
        "--apart",
        12,
    ],
    "same_tokens.py": ["--prompts", 3, "--max-tokens", 6],
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(
    name: str, device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which fail where a token differs; what was decoded on the CPU is kept and read again."""
    file = tmp_path / "kept.json"
    flag = "--alone" if name == "random_requests.py" else "--cpu-tokens"
    for _ in range(2):
        run_here(f"scripts/{name}", *SCRIPTS[name], "--device", device, flag, file)
        assert last_line(capsys.readouterr().out)["check"] == name.removesuffix(".py")
    kept = json.loads(file.read_text())
    if name == "random_requests.py":
        with pytest.raises(AssertionError, match="alone: .* expected 24 of"):
            run_here(f"scripts/{name}", *SCRIPTS[name], "--seed", 7, flag, file)
        count = len(kept["found"][0][0])
        kept["found"][0] = [[[0, 1]] * count, ["length"] * count, [[]] * count]
    else:
        first, second, *_ = kept
        kept[first] = kept[second]
    file.write_text(json.dumps(kept))
    with pytest.raises(AssertionError):
        run_here(f"scripts/{name}", *SCRIPTS[name], "--device", device, flag, file)


@pytest.mark.timeout(600)  # on a GPU kernels of two modes are compiled
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bits_of_whole_engines(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What plain decoding gave is kept; a logit or a state that has other bits is found."""
    kept = tmp_path / "kept.json"
    words = ["--device", device, "--requests", 3, "--max-tokens", 30, "--longest", 70]
    words += ["--chunk", 64, "--drafts", 2, "--state-dtypes", "bfloat16", "--kept", kept]
    run_here("scripts/same_bits.py", *words, "--only-plain")
    right = json.loads(kept.read_text())
    capsys.readouterr()
    run_here("scripts/same_bits.py", *words, "--part", 2, "--parts", 4)
    result = last_line(capsys.readouterr().out)
    assert result["logits"] > 100 and result["states"] > 2
    assert result["differing"] == result["differing_states"] == 0
    assert result["rows"][-1]["setting"] == "control: fast" and result["rows"][-1]["differing"] > 0
    right["bfloat16"]["logits"][1][0] ^= 1
    right["bfloat16"]["states"][2][-1] ^= 1
    kept.write_text(json.dumps(right))
    with pytest.raises(AssertionError):
        run_here("scripts/same_bits.py", *words, "--part", 6, "--parts", 7)
    result = last_line(capsys.readouterr().out)
    assert result["differing"] == result["differing_states"] == 1


def test_none_is_left_out() -> None:
    listed = {*ON_A_CPU, *ON_A_GPU, *ELSEWHERE, *SHARED}
    assert listed == {path.name for path in (ROOT / "benchmarks").glob("*.py")}
    scripts = {path.name for path in (ROOT / "scripts").glob("*.*")}
    assert scripts == {"dynamic_verify.sh", "same_bits.py", "digests.py", *SCRIPTS}


@pytest.mark.parametrize("count", [1, 2, 5])
def test_fifths_of_few_values(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    from spread import median_and_fifths

    median, low, high = median_and_fifths([10.0 * i for i in range(count)])
    assert median == 5.0 * (count - 1)
    assert (low, high) == pytest.approx((2.0 * (count - 1), 8.0 * (count - 1)))
