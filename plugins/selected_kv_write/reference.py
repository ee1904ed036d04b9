"""The definition of SelectedKvWrite in plain torch."""

from torch import Tensor


def reference(keys: Tensor, host_v: Tensor, rows: Tensor, targets: Tensor, k_pool: Tensor, v_pool: Tensor) -> None:
    """Same arguments as `plugins.selected_kv_write`; writes the pools in place."""
    page_size, host_page_size = k_pool.shape[1], host_v.shape[1]
    for n, head in (targets >= 0).nonzero().tolist():
        page, offset = divmod(int(targets[n, head]), page_size)
        host_page, host_offset = divmod(int(rows[n, head]), host_page_size)
        k_pool[page, offset, head] = keys[n, head]
        v_pool[page, offset, head] = host_v[host_page, host_offset, head]
