// The CPU implementations, as native/register.cpp hands them to the dispatcher.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace kvforge {

void rope_paged_kv_write(
    const at::Tensor& k, const at::Tensor& v, const at::Tensor& cos, const at::Tensor& sin,
    const at::Tensor& slot_mapping, at::Tensor& k_pool, at::Tensor& v_pool,
    const std::optional<at::Tensor>& k_scales, const std::optional<at::Tensor>& v_scales, double k_scale,
    double v_scale);

at::Tensor paged_attention(
    const at::Tensor& q, const at::Tensor& k_pool, const at::Tensor& v_pool, const at::Tensor& query_start,
    const at::Tensor& kv_length, const at::Tensor& page_table, double scale, int64_t window,
    const std::optional<at::Tensor>& k_scales, const std::optional<at::Tensor>& v_scales, double k_scale,
    double v_scale);

at::Tensor low_rank_key_reconstruct(
    const at::Tensor& u, const at::Tensor& sv, const at::Tensor& selected_start, const at::Tensor& rows,
    const at::Tensor& positions, const at::Tensor& cos, const at::Tensor& sin);

std::tuple<at::Tensor, at::Tensor> speculative_verify(
    const at::Tensor& logits, const at::Tensor& draft_ids, const at::Tensor& draft_start,
    const at::Tensor& draft_probs, const at::Tensor& temperature, const at::Tensor& uniform);

at::Tensor packed_linear(
    const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& scales,
    const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& norm,
    const std::optional<at::Tensor>& residual, int64_t out_features, double eps, bool gated, bool float32_out);

at::Tensor landmark_select(
    const at::Tensor& q, const at::Tensor& landmarks, const at::Tensor& is_outlier, const at::Tensor& query_start,
    const at::Tensor& table, const at::Tensor& num_chunks, const at::Tensor& num_selected, double scale,
    int64_t max_selected);

std::tuple<at::Tensor, at::Tensor> chunk_cache_update(
    const at::Tensor& selected, at::Tensor& cached, at::Tensor& counts, const at::Tensor& slot);

void selected_kv_write(
    const at::Tensor& u, const at::Tensor& sv, const at::Tensor& host_v, const at::Tensor& slot,
    const at::Tensor& chunks, const at::Tensor& places, const at::Tensor& shadow_table, const at::Tensor& page_table,
    const at::Tensor& cos, const at::Tensor& sin, int64_t chunk_size, at::Tensor& k_pool, at::Tensor& v_pool);

}  // namespace kvforge
