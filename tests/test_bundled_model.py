"""The bundled model: its files, its tokenizer, how `transformers` reads it, what it learnt."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo_model.export import load_folder, model_config, tokenizer_definition
from demo_model.model import DemoConfig, DemoModel
from evaluate_demo_model import evaluate_prompts
from hybridspec.bundled import bundled_model_path, held_out_prompts

FOLDER = bundled_model_path()
FP32_ENDINGS = ("linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm.weight")


@pytest.fixture(scope="module")
def model() -> DemoModel:
    return load_folder(FOLDER)


def prompt_tokens(count: int) -> torch.Tensor:
    """The first code prompts as token ids."""
    texts = [prompt.text.encode() for prompt in held_out_prompts("code")[:count]]
    return torch.tensor([list(text) for text in texts])


def test_the_weights_are_small_and_keep_gates_in_fp32() -> None:
    path = FOLDER / "model.safetensors"
    assert path.stat().st_size <= 8_000_000
    expected = {name: tensor.shape for name, tensor in DemoModel(DemoConfig()).state_dict().items()}
    with safe_open(path, framework="pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert {name: tensor.shape for name, tensor in weights.items()} == expected
    for name, tensor in weights.items():
        dtype = torch.float32 if name.endswith(FP32_ENDINGS) else torch.bfloat16
        assert tensor.dtype == dtype, name
        assert torch.isfinite(tensor).all(), name
    assert sum(name.startswith("mtp.") for name in weights) == 15


def test_the_folder_is_what_the_training_tool_writes() -> None:
    assert json.loads((FOLDER / "config.json").read_text("utf-8")) == model_config(DemoConfig())
    tokenizer = json.loads((FOLDER / "tokenizer.json").read_text("utf-8"))
    assert tokenizer == tokenizer_definition()


def test_token_b_is_byte_b() -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    text = "\x00\t\r\n def f(): # naïve ∑ 🙂\x7f  \n\n"
    text += "".join(chr(code) for code in range(0x250))
    assert tokenizer.encode(text).ids == [256, *text.encode()]
    assert tokenizer.encode(text, add_special_tokens=False).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert [tokenizer.token_to_id(tokenizer.id_to_token(b)) for b in range(256)] == [*range(256)]
    assert tokenizer.encode("<|file|>x").ids == [256, 256, ord("x")]


def test_transformers_reads_the_tokenizer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    text = "    return 'é', <b>\n"
    assert tokenizer(text).input_ids == [256, *text.encode()]
    assert tokenizer.decode(list(text.encode())) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 256)


def test_transformers_reads_the_model_and_agrees(model: DemoModel) -> None:
    other, report = AutoModelForCausalLM.from_pretrained(
        FOLDER, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values())
    tokens = prompt_tokens(2)
    with torch.no_grad():
        expected = other(tokens).logits
    torch.testing.assert_close(model.logits(model(tokens)), expected, rtol=1e-4, atol=1e-4)


def test_the_prompts_are_long_enough_and_many_enough() -> None:
    for kind, count in (("code", 64), ("docs", 32)):
        prompts = held_out_prompts(kind)
        assert len({prompt.text for prompt in prompts}) == len(prompts) >= count
        assert all(len(prompt.text.encode()) == 512 for prompt in prompts)


def test_it_has_learnt_held_out_code(model: DemoModel) -> None:
    tokens = prompt_tokens(8)
    logits = model.logits(model(tokens))[:, :-1]
    bits = torch.nn.functional.cross_entropy(logits.mT, tokens[:, 1:]).item() / math.log(2)
    # The card's 0.96 is for whole files; a prompt has no more than 511 bytes before each byte.
    assert bits < 1.2


def committed(model: DemoModel, temperature: float) -> float:
    """Committed tokens per verify with three drafts, on a few continuations."""
    prompts = [prompt.text.encode()[-128:] for prompt in held_out_prompts("code")[::8]]
    figures = evaluate_prompts(
        model, prompts, temperature=temperature, seed=0, batch=8, num_new_tokens=64
    )
    return figures["all"]["committed_per_verify"][3]


@pytest.mark.parametrize(
    ("temperature", "least"), [(0.0, 3.0), pytest.param(0.8, 2.6, marks=pytest.mark.slow)]
)
def test_its_head_drafts_well(model: DemoModel, temperature: float, least: float) -> None:
    assert committed(model, temperature) > least


def test_a_head_without_training_drafts_badly(model: DemoModel) -> None:
    untrained = DemoModel(DemoConfig()).requires_grad_(False)
    untrained.model.load_state_dict(model.model.state_dict())
    assert committed(untrained, 0.0) < 1.5
