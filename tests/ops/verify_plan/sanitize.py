"""Launch every kernel once on a CUDA device, for compute-sanitizer's racecheck and memcheck.

compute-sanitizer --tool racecheck python tests/ops/verify_plan/sanitize.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from helpers.group_cases import group_case
from helpers.plan_cases import random_case, run_plan
from hybridspec.compat import lightllm
from hybridspec.ops.verify_plan import SamplingColumns, compact_hidden, compact_sampling, launch


def main() -> None:
    """Run all paths on ragged batches with ties."""
    generator = torch.Generator().manual_seed(0)
    for num_requests, num_drafts in ((5, 3), (250, 3), (700, 6)):
        case = random_case(
            generator, num_requests, num_drafts, kind="ties", has_limits=True, num_bins=4,
            share_dead=0.1,
        ).to("cuda")  # fmt: skip
        for is_fused, is_one_block in ((True, True), (False, True), (False, False)):
            config = launch.LaunchConfig(
                is_fused=is_fused, is_one_block=is_one_block, select_warps=4
            )
            plan = run_plan(case, launch.plan_step, config=config)
        compact_hidden(torch.rand(num_requests * (num_drafts + 1), 96).cuda(), plan.sources)
        requests = SamplingColumns.create(num_requests, device="cuda")
        compact_sampling(requests, plan.sources, rows_per_request=num_drafts + 1)
    for num_rows in (100, 3000):
        rows = [tensor.cuda() for tensor in group_case(num_rows, "random")]
        lightllm.build_dynamic_mtp_fa3_decode_params(*rows, num_rows + 50, 0)
    pages = torch.arange(6000, dtype=torch.int32).view(3, 2000).cuda()
    requests = torch.tensor([2, 0], dtype=torch.int32).cuda()
    lightllm.page_table_copy(torch.zeros(2, 1500, dtype=torch.int32).cuda(), pages, requests)
    torch.cuda.synchronize()
    print("all kernels launched")


if __name__ == "__main__":
    main()
