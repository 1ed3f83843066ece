"""One step of speculative decoding, on one page.

Everything that a request needs lies in slot-keyed tensors on the device, so a step is a function of
`lanes`, the slots of the batch: it reads nothing back, and can be launched before the host has seen
what the step before it brought.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from hybridspec.ops.ring import advance, commit
from hybridspec.ops.verify_plan import Step
from hybridspec.speculate.choose import choose_and_accept
from hybridspec.speculate.decoder import Asks, Decoder, Outcome
from hybridspec.speculate.plan import drafted_confidences, plan_rows

__all__ = ["decode_step", "prefill_step", "verify_step"]


def decode_step(
    decoder: Decoder, lanes: Tensor, step: Step, *, num_rows: int, num_drafts: int, asks: Asks
) -> Outcome:
    """Verify every lane's drafts, commit those accepted, and draft anew.

    Args:
        decoder, lanes, step, num_rows, asks: as in `verify_step`.
        num_drafts: most drafts to propose for each request.

    Returns:
        What the step did, on the device.
    """
    outcome, head_hidden, slots = verify_step(decoder, lanes, step, num_rows=num_rows, asks=asks)

    # Propose and store: the drafts of the next step.
    decoder.drafter.propose(decoder, head_hidden, slots, asks, num_drafts)
    return outcome


def verify_step(
    decoder: Decoder, lanes: Tensor, step: Step, *, num_rows: int, asks: Asks
) -> tuple[Outcome, Tensor, Tensor]:
    """Verify every lane's drafts and commit those accepted: all of a step but the next drafts.

    Args:
        decoder: model, memories and the table of requests; in-out.
        lanes: slots of the batch, -1 = padding, no slot twice, [B] int32; in.
        step: where the plan goes, of B requests and at least `num_rows` rows; out.
        num_rows: most rows, at least B; the most probable drafts come first.
        asks: what the requests of the batch may need.

    Returns:
        What the step did, on the device; what the drafter made of each request's last committed
        row, [B, D]; and `lanes` with -1 where a request had no rows, [B] int32.
    """
    pools, drafter = decoder.pools, decoder.drafter

    # Plan: which rows of which requests. One that is done has none.
    slots = plan_rows(decoder, lanes, step, num_rows=num_rows)
    is_learning = decoder.calibration is not None
    confidences = drafted_confidences(decoder, slots) if is_learning else None

    # Forward: every row is appended to the logs of its request, past the cursors.
    hidden = decoder.forward(step)

    # Choose the token after each row; accept the drafts that equal it, and one token more.
    chosen, outcome = choose_and_accept(decoder, hidden, step, asks, seq_len=pools.seq_len)

    # Absorb: the draft head sees every row; what it writes for rejected ones lies past its cursor.
    num_committed = outcome.result.num_committed
    last = (step.cu_seqlens[:-1] + num_committed - 1).clamp(min=0)
    head_hidden = drafter.absorb(chosen.clamp(min=0), hidden, step).index_select(0, last)

    # Commit: every cursor moves over the committed rows. Nothing else does.
    commit(
        pools.seq_len,
        pools.ring_start,
        pools.history_len,
        step.slots,
        step.is_fold,
        step.num_verify_tokens,
        num_committed,
        ring_capacity=pools.specs.options.ring_capacity,
    )
    return replace(outcome, confidences=confidences), head_hidden, slots


def prefill_step(
    decoder: Decoder,
    step: Step,
    next_tokens: Tensor,
    complete: Tensor,
    asks: Asks,
    num_drafts: int,
    *,
    hidden: Tensor | None = None,
) -> tuple[Tensor, Outcome | None]:
    """Store prompt rows; the requests whose prompts they complete get a first token and drafts.

    Args:
        decoder: model, memories and the table of requests; in-out.
        step: layout of the rows, with `is_prefill`; in.
        next_tokens: the prompt's token after each row, [N] int64; where a prompt ends, the first
            token of the answer is put there; in-out.
        complete: which requests of the batch they complete, [C] int64; in.
        asks: what the requests of the batch may need.
        num_drafts: most drafts to propose for each request.
        hidden: hidden states of the rows, where the forward was run already.

    Returns:
        Hidden states of all rows, [N, D], and what `complete` got, None if there are none.
    """
    pools, drafter, outcome = decoder.pools, decoder.drafter, None
    if hidden is None:
        hidden = decoder.forward(step)
    last = (step.cu_seqlens[1:] - 1).long()[complete]
    slots = step.slots[complete]
    if complete.shape[0]:
        # The newest token that is known is the prompt's last one.
        newest = pools.seq_len.clone()
        newest[slots] = step.kv_len[complete] - 1
        chosen, outcome = choose_and_accept(
            decoder, hidden[last], Step.single_rows(slots), asks, seq_len=newest
        )
        next_tokens[last] = chosen.clamp(min=0)
    head_hidden = drafter.absorb(next_tokens, hidden, step)
    advance(pools.seq_len, step.slots, step.num_verify_tokens)
    if complete.shape[0]:
        drafter.propose(decoder, head_hidden[last], slots, asks, num_drafts)
    return hidden, outcome
