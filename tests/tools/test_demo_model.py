"""The training form of the demo model: its recurrence, its chain attention and its bookkeeping."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from demo_model.chain_attention import ChainKeys, chain_attention, flash_chain_attention
from demo_model.decode import Decoder
from demo_model.delta_rule import chunked_delta_rule, invert_unit_lower
from demo_model.export import load_folder
from demo_model.model import DemoConfig, DemoModel, l2_norm
from evaluate_demo_model import draft_everywhere, repeated_share, replay
from hybridspec.bundled import bundled_model_path

HEAD_NAMES = {
    "fc.weight": "eh_proj.weight",
    "pre_fc_norm_embedding.weight": "enorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight",
    "norm.weight": "post_norm.weight",
}


def recurrent_delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor):
    """The rule token by token."""
    groups = v.shape[2] // k.shape[2]
    q, k = q.repeat_interleave(groups, dim=2), k.repeat_interleave(groups, dim=2)
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    outputs = []
    for t in range(v.shape[1]):
        state = state * log_decay[:, t, :, None, None].exp()
        correction = beta[:, t, :, None] * (v[:, t] - (state * k[:, t, ..., None]).sum(-2))
        state = state + k[:, t, ..., None] * correction[..., None, :]
        outputs.append((state * q[:, t, ..., None]).sum(-2))
    return torch.stack(outputs, dim=1)


def test_chunks_give_the_recurrence_and_its_gradients() -> None:
    torch.manual_seed(0)
    q, k = (l2_norm(torch.randn(2, 192, 2, 16, dtype=torch.float64)) for _ in range(2))
    v = torch.randn(2, 192, 4, 8, dtype=torch.float64)
    log_decay, beta = -0.3 * torch.rand(2, 192, 4).double(), torch.rand(2, 192, 4).double()
    inputs = [x.requires_grad_() for x in (q, k, v, log_decay, beta)]
    actual, expected = chunked_delta_rule(*inputs), recurrent_delta_rule(*inputs)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    weights = torch.randn_like(expected)
    gradients = zip(
        torch.autograd.grad((actual * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    )
    for ours, theirs in gradients:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_equal_keys_invert_exactly(decay: float) -> None:
    rows = torch.arange(64)
    system = (decay ** (rows[:, None] - rows).clamp_min(0)).tril(-1)
    product = (system + torch.eye(64)) @ invert_unit_lower(system)
    torch.testing.assert_close(product, torch.eye(64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("num_own", [0, 1, 3])
def test_flash_gradients_serve_the_joint_softmax(num_own: int) -> None:
    torch.manual_seed(1)
    tensors = [torch.randn(2, 3, 64, 16, requires_grad=True) for _ in range(3 + 2 * num_own)]
    q, k, v, *own = tensors
    keys = ChainKeys(k, v, tuple(own[:num_own]), tuple(own[num_own:]))
    plain, flash = chain_attention(q, keys), flash_chain_attention(q, keys)
    torch.testing.assert_close(flash, plain, rtol=0, atol=2e-6)
    weights = torch.randn_like(plain)
    expected = torch.autograd.grad((plain * weights).sum(), tensors)
    actual = torch.autograd.grad((flash * weights).sum(), tensors)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-6)


def test_decoding_token_by_token_gives_the_logits_of_the_window() -> None:
    model = load_folder(bundled_model_path())
    tokens = torch.randint(0, 257, (2, 64), generator=torch.Generator().manual_seed(2))
    decoder = Decoder(model, 2, 64)
    logits = torch.stack([decoder.step(tokens[:, i]) for i in range(64)], dim=1)
    torch.testing.assert_close(logits, model.logits(model(tokens)), rtol=1e-4, atol=1e-4)


def test_drafts_from_every_position_are_those_of_transformers() -> None:
    folder = bundled_model_path()
    model = load_folder(folder)
    config = AutoConfig.from_pretrained(folder)
    config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
    target = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    head = MtpModel(target, 1).eval().requires_grad_(False)
    weights = {
        "layers.0." + HEAD_NAMES.get(name, name.replace("layers.0.", "mtp_block.")): tensor
        for name, tensor in model.mtp.state_dict().items()
    }
    assert not head.load_state_dict(weights, strict=False).unexpected_keys
    tokens = torch.tensor(
        [list(b"import os\n\n\nclass Writer:\n    def __init__(self, name):\n" * 2)]
    )
    drafts = draft_everywhere(model, tokens, 4, 0.0, None)
    with torch.no_grad():
        all_hidden = target.model(tokens).last_hidden_state
    for known in (9, 50, tokens.shape[1]):
        cache, reads, hidden = MtpCache(config=head.config), tokens[:, 1:known], all_hidden
        hidden, positions = hidden[:, : known - 1], torch.arange(known - 1)[None]
        expected = []
        for _ in range(4):
            hidden = head.forward_layer(0, hidden, positions, cache, input_ids=reads)[:, -1:]
            reads, positions = target.lm_head(hidden).argmax(-1), positions[:, -1:] + 1
            expected.append(reads.item())
        assert drafts[0, known - 2].tolist() == expected


def test_the_loss_falls() -> None:
    torch.manual_seed(0)
    model = DemoModel(DemoConfig())
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    text = torch.tensor(list(b"for line in lines:\n    print(line)\n" * 8))
    windows = torch.stack([text[i : i + 64 + 1 + 2] for i in (0, 11, 23)])
    losses = []
    for _ in range(8):
        loss, parts = model.training_loss(windows, num_draft_steps=2, draft_weight=0.3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(parts)
    assert parts.shape == (3,)
    assert (losses[-1] < 0.7 * losses[0]).all()


def test_replay_counts_accepted_prefixes() -> None:
    tokens = [7, 8, 1, 2, 3, 4, 5, 6]
    drafts = [[1, 2], [2, 9], [0, 0], [4, 5], [5, 6], [6, 7], [7, 7]]
    # The prompt 7 8 and the target's 1 are known. Drafts 2 9 for places 3 and 4: one is accepted
    # and 2 3 are committed. Drafts 4 5 for places 5 and 6: both are accepted. Then the text ends.
    assert replay(tokens, drafts, first=2, k=2) == [1, 2]


def test_repeated_share() -> None:
    assert repeated_share(bytes(range(40))) == 0.0
    assert repeated_share(b"ab" * 20) == pytest.approx(23 / 25)
