"""The public function: checks, allocation, op call."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops._checks import INTEGERS, Dims, check, check_dtype
from hybridspec.ops._library import register_kernel
from hybridspec.ops._triton_support import explain_tensors
from hybridspec.ops.accept import cpu, launch
from hybridspec.ops.accept.table import Counts, Ends, RequestTable, StepResult, StepRows, TokenLog

__all__ = ["accept_rows"]


def accept_rows(
    chosen: Tensor, *,
    cu_seqlens: Tensor, num_verify_tokens: Tensor, slots: Tensor, is_fold: Tensor,
    history_len: Tensor, requests: RequestTable, log: TokenLog, end_bits: Tensor, ends_from: Tensor,
    counts: Tensor, count_row: Tensor, result: StepResult | None = None, backend: str = "auto",
) -> StepResult:  # fmt: skip
    """Commit the accepted drafts and one more token, cut at the first end.

        accepted   = largest n with chosen[first + j] == draft j + 1 for all j < n
        committed  = the tokens of rows 0 .. accepted up to the first that ends the request, which
                     is: an end token from position ends_from on, any token at last_position; a
                     token of -1 (NaN logits) ends it too and is not committed

    Committed tokens go to the token log, behind position seq_len, and to the counts of requests
    that have some; the last one becomes the newest token. A request that ended is marked in
    `requests.is_done`. Cursors stay: `commit` moves them by `result.num_committed`.

    Args:
        chosen: the target's token of each row, [N] int64; in.
        cu_seqlens: row offsets of the requests, [B+1] int32; in.
        num_verify_tokens: rows of each request, [B] int32; in.
        slots: slot of each request, -1 = padding, no slot twice, [B] int32; in.
        is_fold: whether each request folds in this step, [B] int8; copied to the result; in.
        history_len: live ring rows of each slot, [S] int32; copied to the result; in.
        requests: newest tokens, drafts, limits and ends of all slots; in-out.
        log: the token log; pages in-out, table and cursors in.
        end_bits: bit t % 32 of word t // 32 marks token t as an end, [S, words] int32; in.
        ends_from: first position at which an end token counts, [S] int32; in.
        counts: how often a request generated a token, 15 bits, and a sign that stays, [C, V] int16;
            in-out.
        count_row: row of `counts` of each slot, -1 = none, [S] int32; in.
        result: where the outcome goes; out.
        backend: "auto", "triton" or "reference".

    Returns:
        `result`, or a new one. Requests without rows committed nothing.

    Raises:
        ValueError, TypeError: if a shape or dtype is wrong.
        UnsupportedError: if the backend does not support the call.

    Numerics:
        Integers only.
    """
    if result is None:
        result = StepResult.create(
            num_requests=slots.shape[0], num_drafts=requests.most_drafts, device=chosen.device
        )
    batch = StepRows(cu_seqlens, num_verify_tokens, slots, is_fold)
    ends, said = Ends(end_bits, ends_from), Counts(counts, count_row)
    _accept_rows(chosen, batch, history_len, requests, log, ends, said, result, backend=backend)
    return result


_ARGUMENTS = (
    ("chosen", "N", torch.int64),
    ("cu_seqlens", "offsets", torch.int32),
    ("num_verify_tokens", "B", torch.int32),
    ("slots", "B", torch.int32),
    ("is_fold", "B", torch.int8),
    ("history_len", "S", torch.int32),
    ("ends_from", "S", torch.int32),
    ("count_row", "S", torch.int32),
    ("end_bits", "S words", torch.int32),
    ("counts", "C V", torch.int16),
)


def _check(
    chosen: Tensor, batch: StepRows, history_len: Tensor, requests: RequestTable, log: TokenLog,
    ends: Ends, counts: Counts, result: StepResult,
) -> None:  # fmt: skip
    dims: Dims = {}
    tensors = (
        chosen, *batch, history_len, ends.begin, counts.row, ends.bits, counts.table
    )  # fmt: skip
    for (name, spec, dtype), tensor in zip(_ARGUMENTS, tensors, strict=True):
        check(name, tensor, spec, dims)
        check_dtype(name, tensor, dtype)
    if dims["offsets"] != dims["B"] + 1:
        raise ValueError(f"cu_seqlens: expected shape [{dims['B'] + 1}], got [{dims['offsets']}]")
    width = StepResult.width(requests.most_drafts)
    if result.packed.shape != (dims["B"], width):
        raise ValueError(
            f"result: expected shape [{dims['B']}, {width}], got {list(result.packed.shape)}"
        )


def _explain(chosen: Tensor, batch: StepRows, *others: object) -> str | None:
    return explain_tensors([("chosen", chosen), ("slots", batch.slots)], INTEGERS)


_accept_rows = register_kernel(
    "accept.accept_rows", _explain, launch.accept_rows, cpu.accept_rows, _check
)
