"""Every family in every form of files: the same logits as transformers, and the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.helpers.direct_runner import DirectRunner
from tests.helpers.tiny_checkpoints import build_tiny_checkpoint
from transformers import AutoModelForCausalLM

from hybridspec.errors import CheckpointError
from hybridspec.models.hybrid import HybridModel, load_model

# One entry per row of the table in docs/checkpoints.md, named as there: the form, and what a file
# of that form holds and what it does not.
FORMS: dict[tuple[str, str], tuple[dict[str, Any], str, str]] = {
    ("Qwen3.5", "as transformers saves it"): (
        {"has_mtp": False},
        "model.layers.0.linear_attn.in_proj_qkv.weight",
        "mtp.fc.weight",
    ),
    ("Qwen3.5", "with a draft head"): ({}, "mtp.fc.weight", "model.language_model.norm.weight"),
    ("Qwen3.5", "shards"): ({"num_shards": 3}, "mtp.fc.weight", "model.visual.pos_embed.weight"),
    ("Qwen3.5", "released names"): (
        {"layout": "language_model"},
        "model.language_model.norm.weight",
        "model.norm.weight",
    ),
    ("Qwen3.5", "composite, shards"): (
        {"layout": "composite", "num_shards": 3},
        "model.visual.pos_embed.weight",
        "model.norm.weight",
    ),
    ("Qwen3.5", "tied head"): ({"tie_word_embeddings": True}, "mtp.fc.weight", "lm_head.weight"),
    ("Qwen3.5", "composite, tied head"): (
        {"layout": "composite", "tie_word_embeddings": True},
        "model.visual.pos_embed.weight",
        "lm_head.weight",
    ),
    ("Qwen3.5 MoE", "as transformers saves it"): (
        {"family": "qwen3_5_moe", "has_mtp": False},
        "model.layers.0.mlp.experts.0.gate_proj.weight",
        "mtp.fc.weight",
    ),
    ("Qwen3.5 MoE", "one tensor per expert, shards"): (
        {"family": "qwen3_5_moe", "num_shards": 3},
        "mtp.layers.0.mlp.experts.5.down_proj.weight",
        "mtp.layers.0.mlp.experts.down_proj",
    ),
    ("Qwen3.5 MoE", "fused experts"): (
        {"family": "qwen3_5_moe", "experts": "fused"},
        "mtp.layers.0.mlp.experts.gate_up_proj",
        "mtp.layers.0.mlp.experts.0.down_proj.weight",
    ),
    ("Qwen3.5 MoE", "composite, fused experts"): (
        {"family": "qwen3_5_moe", "experts": "fused", "layout": "composite"},
        "model.language_model.layers.0.mlp.experts.gate_up_proj",
        "model.language_model.layers.0.mlp.experts.0.up_proj.weight",
    ),
    ("Qwen3-Next", "as transformers saves it"): (
        {"family": "qwen3_next", "has_mtp": False},
        "model.layers.0.linear_attn.in_proj_qkvz.weight",
        "mtp.fc.weight",
    ),
    ("Qwen3-Next", "one tensor per expert, shards"): (
        {"family": "qwen3_next", "num_shards": 3},
        "mtp.layers.0.mlp.experts.5.down_proj.weight",
        "mtp.layers.0.mlp.experts.down_proj",
    ),
    ("Qwen3-Next", "fused experts"): (
        {"family": "qwen3_next", "experts": "fused"},
        "model.layers.3.mlp.experts.gate_up_proj",
        "model.layers.3.mlp.experts.0.up_proj.weight",
    ),
    ("Qwen3-Next", "some layers without experts"): (
        {"family": "qwen3_next", "mlp_only_layers": [1]},
        "model.layers.1.mlp.gate_proj.weight",
        "model.layers.1.mlp.gate.weight",
    ),
}
TOKENS = [(7 * i * i + 3) % 97 for i in range(41)]


def names_in(folder: Path) -> set[str]:
    """Return the names of all tensors in the folder's files."""
    handles = [safe_open(file, "pt") for file in folder.glob("*.safetensors")]
    return set().union(*(handle.keys() for handle in handles))


def logits(model: HybridModel) -> torch.Tensor:
    runner = DirectRunner(model)
    return runner.logits(runner.prefill({1: TOKENS}))


def assert_logits_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    scale = max(1.0, expected.std().item())
    torch.testing.assert_close(actual, expected, atol=2e-4 * scale, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS, ids=", ".join)
def test_form(form: tuple[str, str], tmp_path: Path) -> None:
    options, held, absent = FORMS[form]
    checkpoint = build_tiny_checkpoint(tmp_path, seed=3, **options)
    names = names_in(tmp_path)
    assert held in names and absent not in names
    assert (tmp_path / "model.safetensors.index.json").exists() == ("shards" in form[1])
    model = load_model(tmp_path)
    with torch.inference_mode():
        assert_logits_close(logits(model), checkpoint.model(torch.tensor([TOKENS])).logits[0])
    assert (model.mtp is not None) == options.get("has_mtp", True)
    text = {n for n in names if "visual" not in n}
    assert model.num_parameters == sum(num_elements(tmp_path, text).values())


def test_the_document_has_a_row_for_each_form() -> None:
    document = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"
    rows = [line.strip("|").split("|") for line in document.read_text("utf-8").splitlines()]
    listed = [(row[0].strip(), row[1].strip()) for row in rows if row[0].strip().startswith("Qwen")]
    assert listed == list(FORMS)


def num_elements(folder: Path, names: set[str]) -> dict[str, int]:
    """Return the number of elements of each tensor."""
    found = {}
    for file in folder.glob("*.safetensors"):
        handle = safe_open(file, "pt")
        for name in names & set(handle.keys()):
            found[name] = handle.get_tensor(name).numel()
    return found


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_transformers_reads_the_composite_the_same(family: Any, tmp_path: Path) -> None:
    """The oracle itself: what transformers makes of the files is what they were written from.

    The weights are equal in every bit; the products are not on every processor, as weights that
    were read lie elsewhere in memory.
    """
    checkpoint = build_tiny_checkpoint(tmp_path, family=family, layout="composite", has_mtp=False)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    read, written = theirs.state_dict(), checkpoint.model.state_dict()
    assert list(read) == list(written)
    assert all(torch.equal(read[name], tensor) for name, tensor in written.items())
    with torch.inference_mode():
        expected = checkpoint.model(torch.tensor([TOKENS])).logits
        assert_logits_close(theirs(torch.tensor([TOKENS])).logits, expected)


def edit_head(folder: Path, edit: Any) -> None:
    """Put another head into a folder's one file, or take it out (None)."""
    file = folder / "model.safetensors"
    held = load_file(file)
    embedding = next(held[name] for name in held if name.endswith("embed_tokens.weight"))
    held.pop("lm_head.weight", None)
    if edit is not None:
        held["lm_head.weight"] = edit(embedding)
    save_file(held, file, metadata={"format": "pt"})


def edit_ties(folder: Path, top: bool | None, text: bool | None) -> None:
    """Say at each level of a composite whether the head is tied."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for level, value in ((config, top), (config["text_config"], text)):
        level.pop("tie_word_embeddings", None)
        if value is not None:
            level["tie_word_embeddings"] = value
    file.write_text(json.dumps(config))


def assert_as_transformers_reads_it(folder: Path) -> HybridModel:
    model = load_model(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        assert_logits_close(logits(model), theirs(torch.tensor([TOKENS])).logits[0])
    return model


def test_a_stored_head_counts_though_the_config_ties_it(tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, has_mtp=False, tie_word_embeddings=True)
    edit_head(tmp_path, lambda embedding: embedding.flip(0).contiguous())
    model = assert_as_transformers_reads_it(tmp_path)
    assert not torch.equal(model.head, model.embedding)


def test_a_stored_copy_of_the_embedding_is_shared(tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, has_mtp=False, tie_word_embeddings=True)
    num_parameters = load_model(tmp_path).num_parameters
    edit_head(tmp_path, torch.clone)
    model = assert_as_transformers_reads_it(tmp_path)
    assert model.head is model.embedding
    assert model.num_parameters == num_parameters


@pytest.mark.parametrize(
    ("top", "text"), [(True, False), (False, True), (None, True), (True, None)]
)
def test_a_tie_at_either_level(top: bool | None, text: bool | None, tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, layout="composite", tie_word_embeddings=True)
    edit_ties(tmp_path, top, text)
    model = load_model(tmp_path)
    assert model.head is model.embedding
    edit_head(tmp_path, lambda embedding: embedding.flip(0).contiguous())
    assert torch.equal(load_model(tmp_path).head, model.embedding.flip(0))


def test_no_head_and_no_tie(tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, layout="composite", tie_word_embeddings=True)
    edit_ties(tmp_path, False, None)
    with pytest.raises(CheckpointError, match="lm_head.weight: expected shape .* found no tensor"):
        load_model(tmp_path)


@pytest.mark.parametrize("layout", ["text", "composite"])
def test_rope_fields_at_either_place(layout: Any, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 321.0, "partial_rotary_factor": 0.5}
    build_tiny_checkpoint(tmp_path, layout=layout, rope_parameters=rope)
    nested = load_model(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    fields = config.get("text_config", config)
    moved = fields.pop("rope_parameters")
    fields |= {name: moved[name] for name in ("rope_theta", "partial_rotary_factor")}
    file.write_text(json.dumps(config))
    flat = load_model(tmp_path)
    assert (flat.config.rope_theta, flat.config.rotary_dim) == (321.0, 16)
    expected = logits(nested)
    assert_logits_close(logits(flat), expected)
    fields["rope_theta"] = 3.0
    file.write_text(json.dumps(config))
    with pytest.raises(AssertionError, match="not close"):  # teeth
        assert_logits_close(logits(load_model(tmp_path)), expected)


def test_a_single_file_goes_before_an_index_of_others(tmp_path: Path) -> None:
    """As in transformers: what was saved over shards counts, and not the shards."""
    build_tiny_checkpoint(tmp_path, seed=1, num_shards=2)
    old = logits(load_model(tmp_path))
    build_tiny_checkpoint(tmp_path / "new", seed=2)
    (tmp_path / "new" / "model.safetensors").rename(tmp_path / "model.safetensors")
    with pytest.raises(AssertionError, match="not close"):
        assert_logits_close(logits(load_model(tmp_path)), old)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stored_dtype_does_not_matter_for_gates(dtype: torch.dtype, tmp_path: Path) -> None:
    """A_log and the gated norm stay fp32 as stored; matrices are widened exactly."""
    checkpoint = build_tiny_checkpoint(tmp_path, family="qwen3_next", dtype=dtype)
    with torch.inference_mode():
        expected = checkpoint.model(torch.tensor([TOKENS])).logits[0]
    assert_logits_close(logits(load_model(tmp_path)), expected)
