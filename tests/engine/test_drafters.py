"""Which drafter is used, and that none of them changes a token."""

from __future__ import annotations

import logging
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.tiny_checkpoints import build_tiny_checkpoint
from hybridspec import LLM, CheckpointError, SamplingParams
from hybridspec.engine.draft_vocabulary import draft_vocabulary

GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


def remove_tensors(folder: Path, prefix: str) -> None:
    """Rewrite a folder's file without some tensors."""
    held = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in held.items() if not name.startswith(prefix)}
    assert len(kept) < len(held)
    save_file(kept, folder / "model.safetensors")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("base") / "m", seed=5).folder


@pytest.fixture(scope="module")
def tuned(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base as `save_pretrained` leaves it behind: without its head."""
    folder = Path(shutil.copytree(base, tmp_path_factory.mktemp("tuned") / "m"))
    remove_tensors(folder, "mtp.")
    return folder


def make_prompts() -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(97) for _ in range(n)] for n in (1, 2, 3, 20, 65)] + [[4, 8, 15] * 9]


def make_params() -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=0.9 * (i % 2),
            seed=i,
            max_tokens=40,
            ignore_eos=True,
            repetition_penalty=1.2 if i == 4 else 1.0,
        )
        for i in range(6)
    ]


def tokens_of(llm: LLM) -> list[list[int]]:
    results = llm.generate(prompt_token_ids=make_prompts(), sampling_params=make_params())
    return [result.outputs[0].token_ids for result in results]


@pytest.fixture(scope="module")
def plain(base: Path) -> list[list[int]]:
    return tokens_of(LLM(base, draft_tokens=0, device="cpu"))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_are_those_of_a_fresh_prefill(base: Path, temperature: float) -> None:
    """Steps with rejects leave the head's log as a prefill of the same tokens makes it."""
    params = SamplingParams(temperature=temperature, seed=8, max_tokens=60, ignore_eos=True)
    engine, fresh = (
        LLM(base, draft_tokens=3, verify_rows=99, device="cpu", enable_prefix_caching=False)._engine
        for _ in range(2)
    )
    request = engine.make_request(make_prompts()[3], params)
    engine.submit(request)
    compared = 0
    while engine.has_work:
        engine.step()
        if request.finish_reason or engine.runner.decoder.requests.num_drafts[request.slot] < 3:
            continue
        twin = fresh.make_request(request.history.tolist()[:-1], params)
        fresh.scheduler.add(twin)
        with torch.inference_mode():
            fresh.scheduler.admit()
            fresh.runner.prefill(fresh.scheduler.prefill_chunks())
            fresh.runner.collect(0)
        mine, new = (one.runner.decoder.requests for one in (engine, fresh))
        assert twin.history == request.history
        assert torch.equal(new.next_tokens[twin.slot], mine.next_tokens[request.slot])
        torch.testing.assert_close(
            new.confidences[twin.slot], mine.confidences[request.slot], atol=1e-4, rtol=0
        )
        fresh.abort(twin)
        compared += 1
    accepted = sum(request.stats.accepted_per_step)
    assert compared > 20 and 0 < accepted < sum(request.stats.drafted_per_step)


@pytest.mark.parametrize("verify_rows", [None, 9])
@pytest.mark.parametrize("k", [1, 3, 7])
def test_lookup_changes_no_token(
    tuned: Path, plain: list[list[int]], k: int, verify_rows: int | None
) -> None:
    llm = LLM(tuned, draft_tokens=k, drafter="lookup", device="cpu", verify_rows=verify_rows)
    assert tokens_of(llm) == plain
    assert llm.config.drafter == "lookup" and llm.config.draft_tokens == k


def test_lookup_accepts_what_repeats() -> None:
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    prompt = "names = ['first', 'second', 'third']\n" * 8
    plain, result = (
        LLM("bundled", drafter=drafter, device="cpu").generate(prompt, params)[0]
        for drafter in ("none", "lookup")
    )
    assert result.outputs[0].token_ids == plain.outputs[0].token_ids
    assert set(plain.stats.committed_per_step) == {1} and not any(plain.stats.drafted_per_step)
    assert sum(result.stats.accepted_per_step) > 60


@pytest.mark.parametrize(
    ("has_head", "asked", "k", "used"),
    [
        (True, "auto", 3, "mtp"),
        (True, "mtp", 3, "mtp"),
        (True, "lookup", 3, "lookup"),
        (True, "none", 3, "none"),
        (True, "mtp", 0, "none"),
        (False, "auto", 3, "lookup"),
        (False, "lookup", 2, "lookup"),
        (False, "none", 3, "none"),
        (False, "auto", 0, "none"),
        (False, "mtp", 0, "none"),
    ],
)
def test_which_drafter(
    base: Path,
    tuned: Path,
    has_head: bool,
    asked: str,
    k: int,
    used: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = base if has_head else tuned
    with caplog.at_level(logging.INFO, "hybridspec"):
        llm = LLM(folder, drafter=asked, draft_tokens=k, device="cpu")
    assert llm.config.drafter == used
    assert llm.config.draft_tokens == (0 if used == "none" else k)
    # One attention layer, and the head's own only where the head drafts; 4 bytes are the id.
    assert llm.describe().kv_bytes_per_token == (2 if used == "mtp" else 1) * 2 * 2 * 32 * 4 + 4
    is_told = not has_head and asked == "auto" and k > 0
    assert ("no MTP head" in caplog.text and "--mtp-from" in caplog.text) == is_told
    assert (f"drafter: {used}" in caplog.text) == (used != "none")


def test_a_head_that_is_not_there(tuned: Path) -> None:
    with pytest.raises(ValueError, match=r"^drafter: expected an MTP head .* has none; .*mtp_from"):
        LLM(tuned, drafter="mtp", device="cpu")


@pytest.mark.parametrize("k", [1, 3, 7])
def test_a_head_from_the_base(
    base: Path, tuned: Path, plain: list[list[int]], k: int, caplog: pytest.LogCaptureFixture
) -> None:
    own = LLM(base, draft_tokens=k, device="cpu")
    with caplog.at_level(logging.INFO, "hybridspec"):
        llm = LLM(tuned, mtp_from=base, draft_tokens=k, device="cpu")
    assert f"drafter: mtp of {base}" in caplog.text and "no MTP head" not in caplog.text
    assert llm.describe().has_mtp and llm.config.mtp_from == str(base)
    assert llm.describe().num_parameters == own.describe().num_parameters
    results = llm.generate(prompt_token_ids=make_prompts(), sampling_params=make_params())
    expected = own.generate(prompt_token_ids=make_prompts(), sampling_params=make_params())
    assert [r.outputs[0].token_ids for r in results] == plain
    assert [r.stats.accepted_per_step for r in results] == [
        r.stats.accepted_per_step for r in expected
    ]
    assert results[0].stats.acceptance_by_position()


def test_another_head_in_place_of_the_own(
    base: Path, plain: list[list[int]], tmp_path: Path
) -> None:
    """A head of other numbers drafts other tokens and changes no output."""
    other = build_tiny_checkpoint(tmp_path / "other", seed=6).folder
    own, swapped = LLM(base, device="cpu"), LLM(base, mtp_from=other, device="cpu")
    assert tokens_of(swapped) == plain
    drafts = [
        [s.drafted for s in llm.stream(prompt_token_ids=[3, 1, 4, 1, 5], sampling_params=GREEDY)]
        for llm in (own, swapped)
    ]
    assert drafts[0] != drafts[1]


def test_mtp_from_reads_the_head_only(base: Path, tuned: Path, tmp_path: Path) -> None:
    """Broken or absent tensors outside the head are none of its business."""
    folder = build_tiny_checkpoint(tmp_path / "m", seed=5, num_shards=2).folder
    for file in folder.glob("model-*.safetensors"):
        file.unlink()
    llm = LLM(tuned, mtp_from=folder, device="cpu")
    assert tokens_of(llm) == tokens_of(LLM(base, device="cpu"))


def test_heads_that_do_not_fit(tuned: Path, tmp_path: Path) -> None:
    wide = build_tiny_checkpoint(tmp_path / "wide", hidden_size=64).folder
    with pytest.raises(CheckpointError) as error:
        LLM(tuned, mtp_from=wide, device="cpu")
    assert str(error.value) == (
        f"{wide}/model.safetensors: mtp.layers.0.self_attn.q_proj.weight: "
        "expected shape [256, 48], found [256, 64]"
    )
    heads = build_tiny_checkpoint(
        tmp_path / "heads", num_attention_heads=8, head_dim=16, num_key_value_heads=4
    ).folder
    with pytest.raises(CheckpointError, match="a draft head for this model needs num_attention_h"):
        LLM(tuned, mtp_from=heads, device="cpu")
    headless = build_tiny_checkpoint(tmp_path / "headless", has_mtp=False).folder
    with pytest.raises(CheckpointError) as error:
        LLM(tuned, mtp_from=headless, device="cpu")
    assert str(error.value) == (
        f"{headless}/model.safetensors: expected a draft head (mtp.* tensors), found none"
    )
    half = build_tiny_checkpoint(tmp_path / "half").folder
    remove_tensors(half, "mtp.norm.weight")
    with pytest.raises(CheckpointError, match=r"mtp.norm.weight: expected shape \[48\], found no"):
        LLM(tuned, mtp_from=half, device="cpu")
    moe = build_tiny_checkpoint(tmp_path / "moe", family="qwen3_5_moe").folder
    with pytest.raises(CheckpointError, match=r"mtp.layers.0.mlp.gate_proj.weight: expected"):
        LLM(tuned, mtp_from=moe, device="cpu")
    with pytest.raises(CheckpointError, match="expected a model folder with config.json"):
        LLM(tuned, mtp_from=tmp_path / "nowhere", device="cpu")
    # Without drafts nobody looks for a head.
    assert LLM(tuned, mtp_from=headless, draft_tokens=0, device="cpu").config.drafter == "none"


def test_dummy_weights(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A geometry from config.json alone: the sizes are the real ones, the numbers finite."""
    (tmp_path / "config.json").write_bytes((base / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="found neither"):
        LLM(tmp_path, device="cpu")
    with caplog.at_level(logging.WARNING, "hybridspec"):
        llm = LLM(tmp_path, dummy_weights=True, device="cpu")
    assert "dummy weights" in caplog.text
    info, real = llm.describe(), LLM(base, device="cpu").describe()
    assert info.config.dummy_weights and not real.config.dummy_weights
    assert (info.num_parameters, info.kv_bytes_per_token, info.request_bytes) == (
        real.num_parameters,
        real.kv_bytes_per_token,
        real.request_bytes,
    )
    assert info.has_mtp and llm.config.drafter == "mtp"
    speculative = tokens_of(llm)
    assert speculative == tokens_of(LLM(tmp_path, dummy_weights=True, draft_tokens=0, device="cpu"))
    assert len({token for tokens in speculative for token in tokens}) > 10


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_dummy_weights_of_experts(family: str, tmp_path: Path) -> None:
    checkpoint = build_tiny_checkpoint(tmp_path, family=family)
    (tmp_path / "model.safetensors").unlink()
    llm = LLM(tmp_path, dummy_weights=True, device="cpu")
    own = sum(p.numel() for p in checkpoint.model.parameters())
    own += sum(p.numel() for n, p in checkpoint.mtp.named_parameters() if n.startswith("layers."))
    assert llm.describe().num_parameters == own
    [result] = llm.generate(prompt_token_ids=[1, 2, 3], sampling_params=GREEDY)
    assert len(result.outputs[0].token_ids) == 48
    weights = llm._engine.model.layers[0].mlp.matrices.gate_up
    assert weights.isfinite().all() and 0.5 < weights.std() * 48**0.5 < 2


def test_dummy_models_without_a_head(base: Path, tmp_path: Path) -> None:
    config = (base / "config.json").read_text()
    assert '"mtp_num_hidden_layers": 1' in config
    (tmp_path / "config.json").write_text(
        config.replace('"mtp_num_hidden_layers": 1', '"mtp_num_hidden_layers": 0')
    )
    llm = LLM(tmp_path, dummy_weights=True, device="cpu")
    assert not llm.describe().has_mtp and llm.config.drafter == "lookup"


def test_progress_of_loading(base: Path) -> None:
    seen: list[tuple[int, int]] = []
    LLM(base, device="cpu", on_progress=lambda done, total: seen.append((done, total)))
    total = (base / "model.safetensors").stat().st_size
    assert {whole for _, whole in seen} == {total}
    done = [part for part, _ in seen]
    assert done == sorted(done) and done[-1] == total and len(done) > 20


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"drafter": "medusa"}, ValueError, "^drafter: expected one of auto, mtp, lookup, none"),
        ({"mtp_from": 3}, TypeError, "^mtp_from: expected a text, got 3"),
        ({"mtp_from": "a", "drafter": "lookup"}, ValueError, "^mtp_from: expected drafter 'mtp'"),
        ({"mtp_from": "a", "dummy_weights": True}, ValueError, "^mtp_from: expected no dummy"),
        ({"draft_vocab": [1], "drafter": "lookup"}, ValueError, "^draft_vocab: expected drafter"),
        ({"draft_vocab": "\0"}, ValueError, "^draft_vocab: .*cannot be read"),
        ({"draft_vocab": "\ud800"}, ValueError, "^draft_vocab: .*cannot be read"),
        ({"acceptance": 0.5}, TypeError, "^acceptance: expected a list of numbers, got 0.5"),
        ({"acceptance_spread": 0.5}, ValueError, "^acceptance_spread: expected acceptance"),
        ({"dummy_weights": 1}, TypeError, "^dummy_weights: expected a bool, got 1"),
    ],
)
def test_wrong_options(
    base: Path, options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(base, device="cpu", **options)


def test_a_trimmed_vocabulary_without_a_head(tuned: Path) -> None:
    with pytest.raises(ValueError, match=r"^draft_vocab: expected a model with a draft head"):
        LLM(tuned, device="cpu", draft_vocab=[1])


def test_plain_decoding_leaves_out_what_is_about_drafts(
    base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llm = LLM(base, device="cpu", draft_tokens=0, draft_vocab=[1], acceptance=[0.5])
    assert (llm.config.draft_vocab, llm.config.acceptance) == (None, None)
    assert "synthetic" not in caplog.text


def test_loading_needs_no_gradients(base: Path) -> None:
    model = LLM(base, device="cpu")._engine.model
    assert not any(
        t.requires_grad for t in (model.embedding, model.head, model.layers[0].mixer.in_weight)
    )
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("verify_rows", [None, 9])
def test_a_trimmed_vocabulary_changes_no_token(
    base: Path, plain: list[list[int]], verify_rows: int | None
) -> None:
    llm = LLM(
        base, draft_tokens=3, device="cpu", draft_vocab=range(0, 97, 2), verify_rows=verify_rows
    )
    results = llm.generate(prompt_token_ids=make_prompts(), sampling_params=make_params())
    assert [result.outputs[0].token_ids for result in results] == plain
    even = llm._engine.runner.decoder.requests.next_tokens[:-1, 1:]
    assert (even % 2 == 0).all() and even.any()


def test_files_of_a_trimmed_vocabulary(base: Path, tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text("[5, 3, 5]")
    assert draft_vocabulary(str(tmp_path / "ids.json"), None, 9) == [3, 5]
    (tmp_path / "text").write_text("import os\nimport sys\n")
    tokenizer = LLM("bundled", device="cpu").tokenizer
    ids = draft_vocabulary(str(tmp_path / "text"), tokenizer, 272)
    encoded = tokenizer.encode("import os\nimport sys\n", add_special_tokens=False)
    assert ids == sorted(set(encoded))
    broken = {"{}": "a JSON list", "[true]": "a JSON list", "[9]": "0..8, got 9", "[]": "got none"}
    for content, message in {**broken, "[": "no JSON"}.items():
        (tmp_path / "ids.json").write_text(content)
        with pytest.raises(ValueError, match=f"^draft_vocab: .*{message}"):
            draft_vocabulary(str(tmp_path / "ids.json"), None, 9)
    with pytest.raises(ValueError, match="cannot be read"):
        draft_vocabulary(str(tmp_path / "none"), None, 9)
    with pytest.raises(ValueError, match="the model has no tokenizer"):
        draft_vocabulary(str(tmp_path / "text"), None, 9)
    read: list[int] = []
    with pytest.raises(ValueError, match="^draft_vocab: expected ids in 0..96, got 97"):
        LLM(base, device="cpu", draft_vocab=[97], on_progress=lambda done, _: read.append(done))
    assert not read, "weights were read first"
