"""The registered ops: they choose a backend and call its function of the same name."""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from .._backends import Supports, always, choose_backend
from .._library import register
from .._triton_support import compiler_version, explain_target
from . import reference
from .step import Step
from .views import SamplingColumns

__all__ = [
    "build_params",
    "compact_groups",
    "compact_hidden",
    "compact_sampling",
    "copy_page_table",
    "plan_step",
    "select_rows",
]

_MOST_KERNEL_DRAFTS = 7


@functools.cache
def _explain_device(index: int) -> str | None:
    return explain_target(torch.cuda.get_device_capability(index), compiler_version())


def _supports_triton(anchor: Tensor, num_drafts: int) -> str | None:
    if num_drafts > _MOST_KERNEL_DRAFTS:
        return f"expected at most {_MOST_KERNEL_DRAFTS} drafts a request, got {num_drafts}"
    if anchor.is_cuda:
        return _explain_device(anchor.device.index)
    if compiler_version() is None:
        return "Triton is not installed"
    from .launch import is_interpreted

    return None if is_interpreted() else "the tensors are not on a CUDA device"


# On a CPU the kernels run in Triton's interpreter only: a choice for tests, never automatic.
_ON_DEVICE: dict[str, Supports] = {"triton": _supports_triton, "reference": always}
_ON_CPU: dict[str, Supports] = {"reference": always, "triton": _supports_triton}


def _module(op: str, backend: str, anchor: Tensor, num_drafts: int = 0) -> ModuleType:
    candidates = _ON_DEVICE if anchor.is_cuda else _ON_CPU
    if choose_backend(f"verify_plan.{op}", backend, candidates, anchor, num_drafts) == "reference":
        return reference
    from . import launch

    return launch


def _select_rows(confidences, slots, num_rows, *rest) -> None:
    *others, backend = rest
    module = _module("select_rows", backend, slots, confidences.shape[1])
    module.select_rows(confidences, slots, num_rows, *others)


def _build_params(token_ids, slots, *rest) -> None:
    *others, plan, backend = rest
    module = _module("build_params", backend, slots, token_ids.shape[1] - 1)
    step = Step.of(plan, max_seqlen=token_ids.shape[1])
    module.build_params(token_ids, slots, *others, step)


def _plan_step(confidences, token_ids, slots, *rest) -> None:
    *others, plan, backend = rest
    module = _module("plan_step", backend, slots, confidences.shape[1])
    step = Step.of(plan, max_seqlen=token_ids.shape[1])
    module.plan_step(confidences, token_ids, slots, *others, step)


def _compact_hidden(hidden, sources, out, backend) -> None:
    _module("compact_hidden", backend, hidden).compact_hidden(hidden, sources, out)


def _compact_sampling(requests, sources, rows_per_request, out, backend) -> None:
    module = _module("compact_sampling", backend, sources)
    module.compact_sampling(
        SamplingColumns.of(requests), sources, rows_per_request, SamplingColumns.of(out)
    )


def _compact_groups(requests, seq_len, marks, hold_request, out, backend) -> None:
    module = _module("compact_groups", backend, marks)
    module.compact_groups(requests, seq_len, marks, hold_request, out)


def _copy_page_table(page_table, source, requests, backend) -> None:
    module = _module("copy_page_table", backend, page_table)
    module.copy_page_table(page_table, source, requests)


select_rows = register(
    "verify_plan_select_rows(Tensor confidences, Tensor slots, int num_rows, Tensor? num_drafts, "
    "Tensor? calibration, Tensor(a!) cu_seqlens, Tensor(b!) workspace, str backend)",
    _select_rows,
)
build_params = register(
    "verify_plan_build_params(Tensor token_ids, Tensor slots, Tensor seq_len, Tensor history_len, "
    "Tensor? ring_start, int max_window, Tensor(a!)[] plan, str backend)",
    _build_params,
)
plan_step = register(
    "verify_plan_plan_step(Tensor confidences, Tensor token_ids, Tensor slots, Tensor seq_len, "
    "Tensor history_len, Tensor? ring_start, int num_rows, Tensor? num_drafts, "
    "Tensor? calibration, int max_window, Tensor(a!)[] plan, str backend)",
    _plan_step,
)
compact_hidden = register(
    "verify_plan_compact_hidden(Tensor hidden, Tensor sources, Tensor(a!) out, str backend)",
    _compact_hidden,
)
compact_sampling = register(
    "verify_plan_compact_sampling(Tensor[] requests, Tensor sources, int rows_per_request, "
    "Tensor(a!)[] out, str backend)",
    _compact_sampling,
)
compact_groups = register(
    "verify_plan_compact_groups(Tensor requests, Tensor seq_len, Tensor marks, int hold_request, "
    "Tensor(a!)[] out, str backend)",
    _compact_groups,
)
copy_page_table = register(
    "verify_plan_copy_page_table(Tensor(a!) page_table, Tensor source, Tensor requests, "
    "str backend)",
    _copy_page_table,
)
