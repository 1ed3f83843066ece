"""The oracle against numbers worked out by hand, and the proof that it can fail."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from helpers.gdn_cases import Geometry, assert_same_bits, make_tokens
from helpers.gdn_oracle import Tokens, gates, prepared, recurrence, window_state
from helpers.tolerances import assert_close

SOFTPLUS_ONE = math.log(math.e - 1.0)  # softplus of this is 1


def one_head(q: list[float], k: list[float], v: list[float]) -> Tokens:
    """Return rows of one head and K = V = 1 with decay 1/2 and beta 1/2."""

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)[:, None, None]

    gate = torch.full((len(v), 1), SOFTPLUS_ONE, dtype=torch.float64)
    A_log = torch.tensor([math.log(math.log(2.0))], dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.float64)
    return Tokens(column(q), column(k), column(v), gate, torch.zeros_like(gate), A_log, zero)


def test_two_tokens_by_hand() -> None:
    tokens = one_head(q=[1.0, 2.0], k=[1.0, 1.0], v=[4.0, 6.0])
    state = torch.full((1, 1, 1), 2.0, dtype=torch.float64)
    y, u, states = recurrence(tokens, state, scale=1.0, use_qk_l2norm=False)
    # S: 2 -> 1; u = (4 - 1)/2 = 1.5; S = 2.5.  S: 2.5 -> 1.25; u = (6 - 1.25)/2; S = 3.625.
    torch.testing.assert_close(u.flatten().tolist(), [1.5, 2.375])
    torch.testing.assert_close(states.flatten().tolist(), [2.0, 2.5, 3.625])
    torch.testing.assert_close(y.flatten().tolist(), [2.5, 7.25])


def test_state_is_value_first() -> None:
    """The state maps keys to values: column k of [V, K] answers key k."""
    gate = torch.full((1, 1), -1000.0, dtype=torch.float64)
    k = torch.tensor([[[0.0, 1.0, 0.0]]], dtype=torch.float64)
    v = torch.tensor([[[5.0, 7.0]]], dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.float64)
    tokens = Tokens(k, k, v, gate, -gate, zero, zero)
    _, _, states = recurrence(tokens, torch.zeros(1, 2, 3), use_qk_l2norm=False)
    assert states[1].tolist() == [[[0.0, 5.0, 0.0], [0.0, 7.0, 0.0]]]


def test_gates_by_hand() -> None:
    tokens = one_head(q=[1.0], k=[1.0], v=[1.0])
    log_decay, beta = gates(tokens)
    assert log_decay.item() == pytest.approx(-math.log(2.0), abs=1e-15)
    assert beta.item() == 0.5
    assert gates(tokens, beta_scale=2.0)[1].item() == 1.0


def test_value_heads_share_key_heads_in_runs() -> None:
    """Value head j reads key head j // ratio."""
    geometry = Geometry(heads=2, value_heads=6, key_dim=4, value_dim=3)
    tokens = make_tokens(geometry, 3, torch.Generator().manual_seed(0))
    y, _, _ = recurrence(tokens, torch.zeros(6, 3, 4))
    other = tokens.q.clone()
    other[:, 1] = -other[:, 1]
    flipped, _, _ = recurrence(replace(tokens, q=other), torch.zeros(6, 3, 4))
    assert_same_bits(flipped[:, :3], y[:, :3])
    torch.testing.assert_close(flipped[:, 3:], -y[:, 3:])


def test_rows_are_scaled_to_length_one() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    torch.testing.assert_close(
        prepared(rows), torch.tensor([[0.6, 0.8], [0.0, 0.0]]).double(), atol=1e-7, rtol=0.0
    )
    assert torch.equal(prepared(rows, use_qk_l2norm=False), rows.double())


def test_a_window_leads_to_the_state_after_its_rows() -> None:
    geometry = Geometry()
    generator = torch.Generator().manual_seed(1)
    tokens = make_tokens(geometry, 6, generator)
    state = torch.randn(4, 32, 16, generator=generator, dtype=torch.float64)
    _, u, states = recurrence(tokens, state)
    cum = gates(tokens)[0].cumsum(0)
    for n in range(7):
        after = window_state(state, prepared(tokens.k)[:n], u[:n], cum[:n])
        torch.testing.assert_close(after, states[n], rtol=0.0, atol=1e-13)


@pytest.mark.parametrize("name", ["q", "k", "v", "a", "b", "A_log", "dt_bias", "state"])
def test_teeth(name: str) -> None:
    """A change of one part in 1,000 of any input is an error that the tolerances see."""
    geometry = Geometry()
    generator = torch.Generator().manual_seed(2)
    tokens = make_tokens(geometry, 5, generator)
    state = torch.randn(4, 32, 16, generator=generator, dtype=torch.float64)
    expected, _, _ = recurrence(tokens, state, use_qk_l2norm=False)
    assert_close(expected.clone(), expected, torch.float64)
    if name == "state":
        wrong, _, _ = recurrence(tokens, state * 1.001, use_qk_l2norm=False)
    else:
        part = getattr(tokens, name) * 1.001
        wrong, _, _ = recurrence(replace(tokens, **{name: part}), state, use_qk_l2norm=False)
    for dtype in (torch.float64, torch.float32):
        with pytest.raises(AssertionError, match="not close"):
            assert_close(wrong, expected, dtype)


def test_bits_are_compared() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert_same_bits(nan, nan.clone())
    with pytest.raises(AssertionError):
        assert_same_bits(nan, torch.tensor([float("nan"), -1.0]))
    with pytest.raises(AssertionError):
        assert_same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
