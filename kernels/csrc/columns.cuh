// The second kernel of AdaptiveLoad's D-tile backward (section 3): sums over the rows of a segment, column by column.
//
// Grid (column tile, row tile). A thread is bound to one column and goes down the rows of its tile; the threads of a warp
// read neighbouring columns, so every load is coalesced. It reads x and dh once more than a one-pass backward.
#pragma once

#include "params.cuh"

namespace adaln {

// A dtype that only the launch knows.
struct Any {};

template <class T> __device__ __forceinline__ float read(const Matrix& matrix, int64_t row, int column) {
  return to_float(static_cast<const T*>(matrix.data)[row * matrix.row_stride + column]);
}
template <> __device__ __forceinline__ float read<Any>(const Matrix& matrix, int64_t row, int column) {
  return load_any(matrix.data, matrix.dtype, row * matrix.row_stride + column);
}

constexpr int kColumnThreads = 128;

template <class X, class Y, class H, bool kGate>
__global__ void __launch_bounds__(kColumnThreads) column_kernel(const __grid_constant__ Params p) {
  constexpr int kSums = kGate ? 3 : 2;
  const int column = blockIdx.x * kColumnThreads + threadIdx.x;
  if (column >= p.hidden_size) return;
  const int block = blockIdx.y;
  const int end_row = min((block + 1) * p.rows_per_block, p.num_rows);
  bool is_first = true;
  for (int row = block * p.rows_per_block; row < end_row;) {
    const int segment = segment_of(p, row);
    const int segment_end = min(offsets_of(p)[segment + 1], end_row);
    const float gain = gain_of(p, segment, column);
    float sums[kSums][1] = {};
#pragma unroll 4
    for (; row < segment_end; ++row) {
      const float rstd = p.rstd[row];
      const float normalised = (read<X>(p.x, row, column) - p.mean[row]) * rstd;
      const float dh = read<H>(p.h, row, column);
      sums[0][0] += dh * normalised;
      sums[1][0] += dh;
      if constexpr (kGate) {
        const float dx_out = p.x_out.data != nullptr ? read<X>(p.x_out, row, column) : 0.0f;
        const float* means = p.row_sums + 2 * int64_t(row);
        sums[2][0] += read<Y>(p.y, row, column) * (dx_out + rstd * (dh * gain - means[0] - normalised * means[1]));
      }
    }
    hand_over(p, block, segment, is_first, column, sums);
    is_first = false;
  }
}

}  // namespace adaln
