"""The public interface: forms of input, errors, statistics, description."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from helpers.ascii_tokenizer import END, text_of, write_ascii_tokenizer
from helpers.chat_templates import add_chat_files
from helpers.tiny_checkpoints import build_tiny_checkpoint
from hybridspec import LLM, CapacityError, CheckpointError, SamplingParams, UnsupportedError
from hybridspec.engine import resolve as resolve_module
from hybridspec.engine.outputs import RequestStats

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ascii")
    build_tiny_checkpoint(path, eos_token_id=END, seed=2)
    write_ascii_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, device="cpu")


def test_forms_of_prompts(llm: LLM) -> None:
    [one] = llm.generate("import", GREEDY)
    [listed] = llm.generate(["import"], [GREEDY])
    tokens = llm.tokenizer.encode("import")
    [as_tokens] = llm.generate(prompt_token_ids=tokens, sampling_params=GREEDY)
    [nested] = llm.generate(prompt_token_ids=[tokens], sampling_params=GREEDY)
    in_dicts = llm.generate(
        [
            {"prompt": "import"},
            {"prompt_token_ids": tokens},
            {"prompt_token_ids": tokens, "prompt": ""},
        ],
        GREEDY,
    )
    [in_dict] = llm.generate({"prompt": "import", "multi_modal_data": None}, GREEDY)
    every = (one, listed, as_tokens, nested, *in_dicts, in_dict)
    outputs = [r.outputs[0] for r in every]
    assert len({tuple(output.token_ids) for output in outputs}) == 1
    assert outputs[0].text == text_of(outputs[0].token_ids)
    assert one.prompt == "import" and as_tokens.prompt is None
    assert one.prompt_token_ids == tokens
    assert one.finished and one.outputs[0].finish_reason == "length"


def test_streaming_adds_up(llm: LLM) -> None:
    steps = list(llm.stream("import", SamplingParams(temperature=0, max_tokens=20)))
    [whole] = llm.generate("import", SamplingParams(temperature=0, max_tokens=20))
    assert [t for step in steps for t in step.token_ids] == whole.outputs[0].token_ids
    assert "".join(step.text for step in steps) == whole.outputs[0].text
    assert [step.step for step in steps] == list(range(len(steps)))
    assert steps[0].origins == ["prefill"] and not steps[0].drafted
    assert [step.finished for step in steps] == [False] * (len(steps) - 1) + [True]
    for step in steps[1:]:
        assert len(step.origins) == len(step.token_ids)
        assert (
            step.token_ids[: step.origins.count("accepted")]
            == (step.drafted[: step.origins.count("accepted")])
        )
    assert steps[-1].output.stats.committed_per_step == [len(s.token_ids) for s in steps[1:]]


@pytest.mark.parametrize(
    ("count", "max_tokens", "kept"),
    [(3, 8, 3), (100, 8, 9), (-1, 8, 9), (-1, 509, 3), (-1, 600, 1)],
)
def test_truncated_prompts(llm: LLM, count: int, max_tokens: int, kept: int) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=max_tokens, truncate_prompt_tokens=count, stop_token_ids=range(96)
    )
    [result] = llm.generate("import os", params)
    assert result.prompt_token_ids == llm.tokenizer.encode("import os")[-kept:]


def test_options_of_the_text(llm: LLM) -> None:
    """The last of these tokens is the end token, whose text is special."""
    plain = llm.generate("import", GREEDY)[0].outputs[0]
    bias = {END: 100.0}
    ending = {"temperature": 0, "max_tokens": 6, "min_tokens": 3, "logit_bias": bias}
    kinds = {
        "": {},
        "<|end|>": {"skip_special_tokens": False, "include_stop_str_in_output": True},
    }
    for tail, options in kinds.items():
        output = llm.generate("import", SamplingParams(**ending, **options))[0].outputs[0]
        assert output.token_ids == [*plain.token_ids[:3], END]
        assert output.text == plain.text[:3] + tail
        assert (output.finish_reason, output.stop_reason) == ("stop", None)
    silent = SamplingParams(temperature=0, max_tokens=6, detokenize=False, logprobs=0)
    output = llm.generate("import", silent)[0].outputs[0]
    assert (output.text, output.token_ids) == ("", plain.token_ids)
    assert [one.decoded_token for report in output.logprobs for one in report.values()] == [
        None
    ] * 6
    with pytest.raises(ValueError, match="^stop: expected detokenize with it"):
        llm.generate("import", SamplingParams(stop="a", detokenize=False))
    spaced = SamplingParams(temperature=0, max_tokens=6, spaces_between_special_tokens=False)
    assert llm.generate("import", spaced)[0].outputs[0].text == plain.text
    assert llm.get_tokenizer() is llm.tokenizer


def test_progress_is_shown_on_a_terminal_only(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["import", "from"]
    plain = llm.generate(prompts, GREEDY, progress=True)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    for switch in ({"progress": True}, {"use_tqdm": True}):
        shown = llm.generate(prompts, GREEDY, **switch)
        assert [r.outputs for r in shown] == [r.outputs for r in plain]
        assert "2 of 2 done, " in capsys.readouterr().err
    llm.generate(prompts, GREEDY)
    assert capsys.readouterr().err == ""


def test_no_prompts(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []
    assert llm.generate(prompt_token_ids=[], sampling_params=GREEDY) == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "^prompts: give either"),
        ({"prompts": "a", "prompt_token_ids": [1]}, ValueError, "^prompts: give either"),
        ({"prompts": ""}, ValueError, "^prompt: expected at least one token"),
        ({"prompts": ["a", ""]}, ValueError, "^prompt: expected at least one token"),
        ({"prompts": [3]}, TypeError, "^prompts: expected a text"),
        ({"prompts": [[3]]}, TypeError, "got list; give token ids as prompt_token_ids$"),
        ({"prompts": 3}, TypeError, "^prompts: expected a list of texts"),
        ({"prompts": b"abc"}, TypeError, "^prompts: expected a list of texts"),
        ({"prompts": {"text": "a"}}, UnsupportedError, "^prompts: only text .*, got text in one"),
        ({"prompts": [{}]}, TypeError, "^prompts: expected a text as prompt of a dict, got None"),
        ({"prompts": {"prompt": 3}}, TypeError, "^prompts: expected a text as prompt of a dict"),
        ({"prompts": {"prompt_token_ids": 3}}, TypeError, "^prompt_token_ids: expected a list"),
        ({"prompts": {"a", "b"}}, TypeError, "^prompts: expected a list of texts, got set"),
        ({"prompt_token_ids": [[]]}, ValueError, "^prompt: expected at least one token"),
        ({"prompt_token_ids": [1, 97]}, ValueError, "^prompt_token_ids: expected ids in 0..96"),
        ({"prompt_token_ids": [1, -1]}, ValueError, "^prompt_token_ids: expected ids in 0..96"),
        ({"prompt_token_ids": [1, 2.5]}, TypeError, "^prompt_token_ids: expected integers"),
        ({"prompt_token_ids": [1, "a"]}, TypeError, "^prompt_token_ids: expected integers"),
        ({"prompt_token_ids": "abc"}, TypeError, "^prompt_token_ids: expected"),
        ({"prompt_token_ids": 5}, TypeError, "^prompt_token_ids: expected"),
        ({"prompt_token_ids": [1] * 512}, ValueError, "^prompt: expected fewer tokens .* 512"),
        ({"prompts": ["a", "b"], "sampling_params": [GREEDY]}, ValueError, "^sampling_params: "),
        (
            {"prompts": "a", "sampling_params": {"top_p": 1}},
            TypeError,
            "^sampling_params: expected SamplingParams, got dict",
        ),
        ({"prompts": "a", "sampling_params": 5}, TypeError, "^sampling_params: expected Samp"),
        ({"prompts": "a\ud800"}, ValueError, "^text: expected .* surrogate"),
        (
            {"prompts": "a", "sampling_params": SamplingParams(stop_token_ids=[97])},
            ValueError,
            "^stop_token_ids: expected ids below the vocabulary size 97, got 97",
        ),
    ],
)
def test_bad_requests(
    llm: LLM, arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        llm.generate(**{"sampling_params": GREEDY, **arguments})
    assert not llm._engine.has_work
    assert llm._engine.allocator.num_live == 0


def test_stream_checks_at_once(llm: LLM) -> None:
    with pytest.raises(ValueError, match="^prompt: expected at least one token"):
        llm.stream("")
    with pytest.raises(TypeError, match="^prompt: expected one text"):
        llm.stream(["a"])
    with pytest.raises(TypeError, match="^prompt_token_ids: expected one list"):
        llm.stream(prompt_token_ids=[[1], [2]])


def test_a_request_that_can_never_fit(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm._engine.allocator, "can_grow", False)
    monkeypatch.setattr(type(llm._engine.pools), "num_pages", property(lambda pools: 2))
    with pytest.raises(CapacityError, match="does not fit the KV pages"):
        llm.generate(prompt_token_ids=[1] * 100, sampling_params=SamplingParams(max_tokens=60))


def test_without_a_tokenizer(tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, eos_token_id=None)
    llm = LLM(tmp_path, device="cpu")
    assert llm.tokenizer is None
    [result] = llm.generate(prompt_token_ids=[1, 2], sampling_params=GREEDY)
    assert len(result.outputs[0].token_ids) == 6 and result.outputs[0].text == ""
    with pytest.raises(ValueError, match="^prompt: .* has no tokenizer.json"):
        llm.generate("import", GREEDY)
    with pytest.raises(ValueError, match="^stop: needs a tokenizer"):
        llm.generate(prompt_token_ids=[1], sampling_params=SamplingParams(stop="a"))


def test_a_model_that_does_not_fit_the_memory(tmp_path: Path) -> None:
    file = build_tiny_checkpoint(tmp_path / "m").folder / "config.json"
    sizes = {"vocab_size": 1 << 24, "hidden_size": 1 << 24}
    file.write_text(json.dumps({**json.loads(file.read_text()), **sizes}))
    with pytest.raises(CapacityError, match="^model: .* does not fit the memory"):
        LLM(file.parent, dummy_weights=True, device="cpu")


@pytest.mark.parametrize(("model", "error"), [(3, TypeError), (None, TypeError), ("", ValueError)])
def test_models_that_are_none(model: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="^model: expected a folder or an id"):
        LLM(model)


def test_bad_folders(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="config.json"):
        LLM(tmp_path / "nowhere", device="cpu")
    with pytest.raises(ValueError, match="^max_model_len: expected at most the model's 512"):
        build_tiny_checkpoint(tmp_path)
        (tmp_path / "model.safetensors").write_bytes(b"")  # refused before weights are looked at
        LLM(tmp_path, device="cpu", max_model_len=513)
    with pytest.raises(TypeError, match="^on_progress: expected a function, got 3"):
        LLM(tmp_path, device="cpu", on_progress=3)


def test_what_it_prints_as(llm: LLM, folder: Path) -> None:
    text = repr(llm)
    assert text.startswith(f"LLM('{folder}'") and "draft_tokens=3" in text and "'cpu'" in text


def test_describe(llm: LLM) -> None:
    info = llm.describe()
    # 3 GDN layers of 4 heads x 16 x 16 in fp32
    assert info.request_bytes["GDN state"] == 3 * 4 * 16 * 16 * 4
    assert info.snapshot_bytes == 4 * info.request_bytes["GDN state"]
    # ring: (2 x 16 + 4 x 16) numbers and 4 decays per row; conv ring: 16 rows x 128 channels
    assert info.request_bytes["GDN ring"] == 3 * 32 * ((32 + 64) * 4 + 4 * 4)
    assert info.request_bytes["conv ring"] == 3 * 16 * 128 * 4
    # one attention layer and the draft head's, and the token itself
    assert info.kv_bytes_per_token == 2 * 2 * 2 * 32 * 4 + 4
    assert info.num_requests_fit >= 1
    assert info.config.dtype == "float32" and info.config.device == "cpu"
    assert info.has_mtp and set(info.backends) >= {"gated_delta_rule", "paged_attention"}
    assert info.num_parameters > 0


def test_acceptance_by_position() -> None:
    stats = RequestStats(
        committed_per_step=[4, 1, 2], drafted_per_step=[3, 3, 1], accepted_per_step=[3, 0, 1]
    )
    assert stats.acceptance_by_position() == [2 / 3, 1 / 2, 1 / 2]
    assert RequestStats().acceptance_by_position() == []


@pytest.mark.parametrize(("asked", "expected"), [(None, 1), (2, 2), (1024, 2)])
def test_threads_of_a_step(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    asked: int | None,
    expected: int,
) -> None:
    """Small models run on one thread, none on more than there are cores; torch's number is put back
    after each step."""
    monkeypatch.setattr(resolve_module, "num_cores", lambda: 2)
    llm = LLM(folder, device="cpu", threads=asked)
    seen = set()
    forward = type(llm._engine.model).forward

    def spy(*arguments: object) -> torch.Tensor:
        seen.add(torch.get_num_threads())
        return forward(*arguments)

    monkeypatch.setattr(type(llm._engine.model), "forward", spy)
    outside = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        llm.generate("import", GREEDY)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(outside)
    assert seen == {expected}
    assert llm.config.threads == expected
    warned = [text for text in caplog.messages if text.startswith("threads: ")]
    assert warned == (["threads: 1024 on 2 cores, taking 2"] if asked == 1024 else [])


def test_options_by_other_names(folder: Path) -> None:
    llm = LLM(folder, device="cpu", gpu_memory_utilization=0.5, enforce_eager=True)
    assert llm.config.memory_fraction == 0.5
    assert LLM(folder, device="cpu").config.memory_fraction == 0.9
    assert llm.get_tokenizer() is llm.tokenizer
    assert llm.get_default_sampling_params() == llm.default_sampling_params()
    with pytest.raises(ValueError, match="^memory_fraction, gpu_memory_utilization: give one"):
        LLM(folder, device="cpu", memory_fraction=0.5, gpu_memory_utilization=0.5)


def test_the_seed_of_an_engine(folder: Path) -> None:
    """The same requests in the same order get the same seeds, and different ones each."""
    sampled = SamplingParams(max_tokens=20, ignore_eos=True)
    outcomes = []
    for seed in (5, 5, 6):
        llm = LLM(folder, device="cpu", seed=seed)
        results = llm.generate(["import", "import"], sampled)
        outcomes.append([result.outputs[0].token_ids for result in results])
    assert outcomes[0] == outcomes[1] != outcomes[2]
    assert outcomes[0][0] != outcomes[0][1]


def test_no_more_requests_at_a_time_than_asked_for(folder: Path) -> None:
    llm = LLM(folder, device="cpu", max_num_seqs=2)
    engine = llm._engine
    requests = [engine.make_request([1, 2, 3], GREEDY) for _ in range(5)]
    for request in requests:
        engine.submit(request)
    peak = 0
    while engine.has_work:
        engine.step()
        peak = max(peak, engine.allocator.num_live)
    assert peak == 2
    assert {request.finish_reason for request in requests} == {"length"}
    assert llm.describe().num_requests_fit <= 2


def test_prompt_rows_of_a_pass(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(folder, device="cpu", max_num_batched_tokens=7)
    seen = []
    prefill = llm._engine.runner.prefill

    def spy(chunks: list[tuple[object, int]]) -> None:
        seen.append(sum(rows for _, rows in chunks))
        prefill(chunks)

    monkeypatch.setattr(llm._engine.runner, "prefill", spy)
    lengths = [3, 20, 9]
    llm.generate(prompt_token_ids=[[1] * n for n in lengths], sampling_params=GREEDY)
    assert sum(seen) == sum(lengths) and max(seen) <= 7


def test_another_models_tokenizer(folder: Path, tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path / "bare", eos_token_id=END, seed=2)
    add_chat_files(folder, "{{ messages[0].content }}!")
    llm = LLM(tmp_path / "bare", device="cpu", tokenizer=folder)
    [result] = llm.generate("import", GREEDY)
    assert result.outputs[0].text == text_of(result.outputs[0].token_ids)
    assert llm.chat_prompt([{"role": "user", "content": "Hello"}]) == "Hello!"
    with pytest.raises(CheckpointError, match="bare: expected tokenizer.json, found none"):
        LLM(folder, device="cpu", tokenizer=tmp_path / "bare")


def test_a_revision_needs_the_hub(folder: Path) -> None:
    for model in (folder, "bundled"):
        with pytest.raises(ValueError, match="^revision: expected an id on the hub with it"):
            LLM(model, device="cpu", revision="main")


def test_a_name_that_no_folder_can_have() -> None:
    with pytest.raises(CheckpointError, match="^model: 'xxx.*: File name too long"):
        LLM("x" * 5000)
