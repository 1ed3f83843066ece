"""The distribution of sampled tokens under speculation is the model's softmax."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from helpers.drafters import run
from helpers.tiny_checkpoints import TinyCheckpoint
from hybridspec import LLM, SamplingParams
from hybridspec.ops.accept import cpu

PROMPT = [5, 17, 3, 88, 41]
NUM_SAMPLES = 2000
TEMPERATURE = 0.4  # so that the second token is often preceded by the same first one


def chi_square_p(counts: Counter[int], probs: torch.Tensor) -> float:
    """P-value of Pearson's chi-square test; cells with fewer than 5 expected are pooled."""
    total = sum(counts.values())
    cells: list[tuple[float, float]] = []
    rare_seen = rare_expected = 0.0
    for token, prob in enumerate(probs.tolist()):
        if prob * total >= 5:
            cells.append((counts[token], prob * total))
        else:
            rare_seen += counts[token]
            rare_expected += prob * total
    cells.append((rare_seen, rare_expected))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def sampled(tiny: TinyCheckpoint) -> list[list[int]]:
    """Continuations of PROMPT under 2,000 seeds, decoded with drafts."""
    engine = LLM(tiny.folder, draft_tokens=2, device="cpu")._engine
    params = [
        SamplingParams(temperature=TEMPERATURE, seed=seed, max_tokens=4)
        for seed in range(NUM_SAMPLES)
    ]
    return [request.token_ids for request in run(engine, [PROMPT] * NUM_SAMPLES, params)]


def p_values(tiny: TinyCheckpoint, samples: list[list[int]]) -> tuple[float, float]:
    """Test the first token (prefill), and the second (verify) after the commonest first."""

    def probs(prefix: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits = tiny.model(torch.tensor([prefix])).logits[0, -1].double()
        return torch.softmax(logits / TEMPERATURE, -1)

    firsts = Counter(tokens[0] for tokens in samples)
    [(first, count)] = firsts.most_common(1)
    assert count > 200
    seconds = Counter(tokens[1] for tokens in samples if tokens[0] == first)
    return chi_square_p(firsts, probs(PROMPT)), chi_square_p(seconds, probs([*PROMPT, first]))


def test_sampled_tokens_follow_the_softmax(tiny: TinyCheckpoint) -> None:
    assert min(p_values(tiny, sampled(tiny))) > 1e-3


def test_a_wrong_acceptor_is_found(tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: accepting every draft gives the drafter's distribution."""

    def accept_all(
        chosen: list[int], drafts: list[int], first: int, last: int, is_end: object
    ) -> tuple[list[int], int, int]:
        tokens = [*drafts, chosen[-1]][: last - first + 1]
        return tokens, len(drafts), 2 if first + len(tokens) > last else 0

    monkeypatch.setattr(cpu, "accept_one", accept_all)
    assert p_values(tiny, sampled(tiny))[1] < 1e-9
