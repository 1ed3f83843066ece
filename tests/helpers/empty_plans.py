"""A step to verify, and its compaction, without any request."""

from __future__ import annotations

import torch

from hybridspec.ops.verify_plan import (
    SamplingColumns,
    Step,
    build_params,
    compact_groups,
    compact_hidden,
    compact_sampling,
    copy_page_table,
    plan_step,
)

__all__ = ["check_no_requests"]


def check_no_requests(backend: str, device: str = "cpu") -> None:
    """Every function takes none and leaves padding rows only."""

    def integers(*shape: int, value: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    none, tokens = integers(0), integers(0, 3, dtype=torch.int64)
    drafts = torch.zeros(0, 2, device=device)
    for cursors in (none, integers(3, value=5)):
        for is_whole in (True, False):
            plan = Step.create(max_requests=4, max_rows=8, max_drafts=2, device=device)
            plan.token_ids.fill_(7)
            plan.slots.fill_(7)
            if is_whole:
                plan_step(drafts, tokens, none, cursors, cursors, plan=plan, backend=backend)
            else:
                build_params(tokens, none, cursors, cursors, plan=plan, backend=backend)
            assert plan.cu_seqlens.eq(0).all() and plan.num_verify_tokens.eq(0).all()
            assert plan.kv_len.eq(0).all() and plan.is_fold.eq(0).all()
            assert plan.token_ids.eq(0).all() and plan.positions.eq(0).all()
            assert plan.slots.eq(-1).all() and plan.sources.eq(-1).all()
    hold = integers(3, value=-1)
    hidden = compact_hidden(torch.zeros(0, 4, device=device), hold, backend=backend)
    assert hidden.shape == (3, 4) and hidden.eq(0).all()
    fields = {name: torch.zeros(0, device=device) for name in ("temperature", "top_p", "min_p")}
    columns = SamplingColumns(**fields, top_k=none, seeds=integers(0, dtype=torch.int64))
    rows = compact_sampling(columns, hold, rows_per_request=3, backend=backend)
    assert rows.temperature.eq(0).all() and rows.top_p.eq(1).all()
    found = compact_groups(none, none, none, num_entries=3, hold_request=-2, backend=backend)
    assert [part.tolist() for part in found] == [[0] * 3, [0] * 3, [-2] * 3]
    copy_page_table(integers(0, 4), integers(3, 8), none, backend=backend)
