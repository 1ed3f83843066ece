"""Two functions of LightLLM's FlashAttention-3 decode state, for CPU and CUDA tensors.

Follows ModelTC/LightLLM, lightllm/common/basemodel/triton_kernel/fa3_utils.py. Signatures and
meaning were compared with commit 027ce10e9d542717fcc98fb671aa6cc279723123, where the first function
has since been renamed to build_dynamic_spec_fa3_decode_params. No code was taken.
"""

from __future__ import annotations

from torch import Tensor

from ..ops.verify_plan import compact_groups, copy_page_table

__all__ = ["build_dynamic_mtp_fa3_decode_params", "page_table_copy"]


def build_dynamic_mtp_fa3_decode_params(
    b_req_idx: Tensor,
    b_seq_len: Tensor,
    b_mark_shared_group: Tensor,
    att_batch_size: int,
    hold_req_id: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Turn verified rows into one entry per request for FlashAttention-3; nothing is modified.

    Args:
        b_req_idx: request of each row, [n], int32 or int64; in.
        b_seq_len: tokens that each row sees, its own included, [n], int32 or int64; in.
        b_mark_shared_group: number of rows of the group that ends at this row, else 0, [n]; in.
        att_batch_size: entries of the result; LightLLM passes n, any number that holds all groups
            works.
        hold_req_id: request of the entries that are left over.

    Returns:
        b_q_seq_len, b_kv_seq_len, b_att_req_idx and b_att_seq_len, each [att_batch_size], int32:
        the marks of the group ends, their b_seq_len, their b_req_idx, and their b_seq_len again,
        in row order; then (0, 0, hold_req_id, 0).

    Raises:
        ValueError, TypeError: if a shape or dtype is wrong, or on a CPU there are too many groups.
    """
    q_seq_len, kv_seq_len, req_idx = compact_groups(
        b_req_idx,
        b_seq_len,
        b_mark_shared_group,
        num_entries=att_batch_size,
        hold_request=hold_req_id,
    )
    # Tensors of their own, as there: a caller may change one of the two lengths.
    return q_seq_len, kv_seq_len, req_idx, kv_seq_len.clone()


def page_table_copy(page_table: Tensor, req_to_token_indexs: Tensor, b_req_idx: Tensor) -> None:
    """Copy the page table of each request of a batch into `page_table`, in place.

        page_table[i] = req_to_token_indexs[b_req_idx[i], :page_table.shape[1]]

    Args:
        page_table: [B, width], int32 or int64, any strides; out.
        req_to_token_indexs: [S, >= width], int32 or int64, any strides; in.
        b_req_idx: [B], int32 or int64; in.

    Raises:
        ValueError, TypeError: if a shape or dtype is wrong.
    """
    copy_page_table(page_table, req_to_token_indexs, b_req_idx)
