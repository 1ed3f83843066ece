"""Requests with random sampling options, and a slow second opinion on which tokens they give."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import (
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from hybridspec.config import SamplingParams
from hybridspec.ops.sampling import gumbel_noise

__all__ = ["expected_tokens", "random_params", "random_prompts"]

VOCAB = 97  # of the tiny checkpoints


def random_prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Return prompts of few different tokens, so that penalties and bad words have much to do."""
    prompts = []
    for _ in range(count):
        some = [rng.randrange(VOCAB) for _ in range(rng.choice([2, 6, 40]))]
        prompts.append([rng.choice(some) for _ in range(rng.choice([1, 2, 3, 7, 20, 65]))])
    return prompts


def random_params(rng: random.Random, **fixed: Any) -> SamplingParams:
    """Return parameters of which each option is on in about every third request."""

    def token() -> int:
        return rng.randrange(VOCAB)

    choices = {
        "temperature": lambda: rng.choice([0.5, 1.0, 1.5]),
        "top_k": lambda: rng.choice([1, 5, 40]),
        "top_p": lambda: rng.choice([0.5, 0.9]),
        "min_p": lambda: rng.choice([0.02, 0.2]),
        "min_tokens": lambda: rng.choice([2, 9]),
        "stop_token_ids": lambda: [token() for _ in range(3)],
        "repetition_penalty": lambda: rng.choice([0.7, 1.1, 1.8]),
        "frequency_penalty": lambda: rng.choice([-1.0, 0.3, 2.0]),
        "presence_penalty": lambda: rng.choice([-1.5, 0.6, 2.0]),
        "logit_bias": lambda: {token(): rng.choice([-100, -2.5, 3.0]) for _ in range(4)},
        "bad_words": lambda: (
            [[token()] for _ in range(5)] + [[token(), token()] for _ in range(40)]
        ),
        "logprobs": lambda: rng.choice([0, 1, 4]),
        "prompt_logprobs": lambda: rng.choice([0, 2]),
        "n": lambda: rng.choice([2, 3]),
        "draft_tokens": lambda: rng.choice([0, 1, 2]),
    }
    chosen = {name: make() for name, make in choices.items() if rng.random() < 0.35}
    base = {"temperature": 0.0, "seed": rng.randrange(2**63), "max_tokens": rng.randrange(9, 25)}
    return SamplingParams(**{**base, **chosen, **fixed})


def expected_tokens(
    logits: torch.Tensor, prompt: list[int], output: list[int], params: SamplingParams
) -> list[int]:
    """Say which token should stand at each place of an output, token by token.

    The processors of transformers do what they can; the rest is plain Python.

    Args:
        logits: of the rows that predict the tokens of `output`, [T, V].
        prompt: the prompt.
        output: the tokens that were generated, which are also what each row looks back on.
        params: the request's parameters, with a seed and no EOS.
    """
    return [
        _expected(logits[place].double(), prompt, output[:place], params)
        for place in range(len(output))
    ]


def _expected(
    scores: torch.Tensor, prompt: list[int], said: list[int], params: SamplingParams
) -> int:
    prefix = torch.tensor([prompt + said])
    before = LogitsProcessorList()
    if params.logit_bias:
        biases = [[[token], float(bias)] for token, bias in params.logit_bias.items()]
        before.append(SequenceBiasLogitsProcessor(biases))
    if params.repetition_penalty != 1:
        before.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    scores = before(prefix, scores[None].clone())[0].double()
    for token in range(len(scores)):
        count = said.count(token)
        scores[token] -= params.frequency_penalty * count
        scores[token] -= params.presence_penalty * (count > 0)
    after = LogitsProcessorList()
    if params.bad_words:
        after.append(NoBadWordsLogitsProcessor([list(word) for word in params.bad_words]))
    # A token in front, since the processor leaves out words as long as prefix and next token.
    scores = after(torch.tensor([[-1, *prompt, *said]]), scores[None])[0]
    if len(said) < params.min_tokens:
        scores[list(params.stop_token_ids)] = -torch.inf
    if params.temperature == 0:
        return int(scores.argmax())
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    scores = warpers(prefix, scores[None])[0]
    kept = _nucleus(torch.softmax(scores, -1).tolist(), params.top_p, params.min_p)
    noise = gumbel_noise(
        torch.tensor([params.seed]), torch.tensor([len(prompt) + len(said)]), len(scores)
    )[0]
    return max(kept, key=lambda token: float(scores[token] + noise[token]))


def _nucleus(probs: list[float], top_p: float, min_p: float) -> list[int]:
    """Tokens that top_p, then min_p keep."""
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    kept, mass = [], 0.0
    for token in order:
        if probs[token] == 0 or (kept and mass >= top_p and top_p < 1):
            break
        kept.append(token)
        mass += probs[token]
    return [token for token in kept if probs[token] >= min_p * probs[kept[0]]]
