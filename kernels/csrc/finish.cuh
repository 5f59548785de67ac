// The end of every backward: add the sums that blocks left, in a fixed order.
//
// Block (32, 32): a column of threads adds every 32nd slot, then a warp adds those. Grid y: the segments that cross the
// border of a block, of which at most one starts in any block; and one more for the affine part.
#pragma once

#include "params.cuh"

namespace adaln {

constexpr int kFinishSide = 32;

template <int kSums>
__global__ void __launch_bounds__(kFinishSide* kFinishSide) finish_kernel(const __grid_constant__ Params p) {
  __shared__ float parts[kSums][kFinishSide][kFinishSide + 1];
  const int32_t* offsets = offsets_of(p);
  const int num_crossing = min(p.num_segments, p.num_blocks);
  const bool is_affine = int(blockIdx.y) == num_crossing;
  const int column = blockIdx.x * kFinishSide + threadIdx.x;
  if (!is_affine && p.partials == nullptr) return;
  int segment = blockIdx.y, first_block = 0, last_block = p.num_blocks - 1, first_row = 0;
  if (!is_affine) {
    if (p.num_segments > p.num_blocks) {
      segment = segment_of(p, min((int(blockIdx.y) + 1) * p.rows_per_block, p.num_rows) - 1);
      if (offsets[segment] < int(blockIdx.y) * p.rows_per_block) return;  // another block's
    }
    first_row = offsets[segment];
    first_block = first_row / p.rows_per_block;
    last_block = (offsets[segment + 1] - 1) / p.rows_per_block;
    if (first_row == offsets[segment + 1]) last_block = -1;  // empty: its gradients are zero
    else if (first_block == last_block) return;              // finished where it was summed
  }
  const int num_kept = is_affine ? 2 : kSums;
  float total[kSums] = {};
  if (column < p.hidden_size) {
#pragma unroll 4
    for (int block = first_block + int(threadIdx.y); block <= last_block; block += kFinishSide) {
      const int slot = is_affine ? block : 2 * block + (first_row > block * p.rows_per_block ? 1 : 0);
      const float* source = is_affine ? p.affine_partials : p.partials;
#pragma unroll
      for (int k = 0; k < kSums; ++k) {
        if (k < num_kept) total[k] += source[(int64_t(slot) * num_kept + k) * p.hidden_size + column];
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kSums; ++k) parts[k][threadIdx.y][threadIdx.x] = total[k];
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kSums; ++k) {
    total[k] = parts[k][threadIdx.x][threadIdx.y];
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) total[k] += __shfl_xor_sync(kAllLanes, total[k], bit);
  }
  const int summed_column = blockIdx.x * kFinishSide + threadIdx.y;
  if (threadIdx.x == 0 && summed_column < p.hidden_size) {
    if (is_affine) {
      put(p.dweight, 0, summed_column, total[0]);
      put(p.dbias, 0, summed_column, total[1]);
    } else {
      put_modulation_gradients(p, segment, summed_column, total, kSums);
    }
  }
}

}  // namespace adaln
