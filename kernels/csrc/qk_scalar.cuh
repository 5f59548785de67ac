// RMSNorm and rotation of queries and keys for any size and alignment. A warp computes one norm.
#pragma once

#include "qk_norm_rope.cuh"

namespace adaln {

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) value += __shfl_xor_sync(kAllLanes, value, bit);
  return value;
}

constexpr int kQkScalarThreads = 256;

struct QkNorm {
  const QkParams& p;
  const QkSide& side;
  int row, group;

  __device__ __forceinline__ int64_t index(const Heads& tensor, int column) const {
    const int of_row = group * p.width + column;
    return row * tensor.row_stride + (of_row / p.head_dim) * tensor.head_stride + of_row % p.head_dim;
  }
  __device__ __forceinline__ float read(const Heads& tensor, int column) const {
    return load_any(tensor.data, p.dtype, index(tensor, column));
  }
  __device__ __forceinline__ float weight(int column) const { return load_any(side.weight, side.weight_dtype, column); }
  __device__ __forceinline__ float normalised(int column, float rstd) const {
    return read(side.x, column) * rstd * weight(column);
  }
  // The gradient of what was turned, turned back.
  __device__ __forceinline__ float grad(int column) const {
    const float value = read(side.out, column);
    return p.rotary == nullptr ? value : turned(value, read(side.out, column ^ 1), column, -1.0f);
  }
  // One of a pair, whose other is given.
  __device__ __forceinline__ float turned(float value, float other, int column, float sign) const {
    const float* turn = p.rotary + int64_t(row % p.rotary_rows) * p.head_dim + column % p.head_dim / 2 * 2;
    return value * turn[0] + (column % 2 == 0 ? -sign : sign) * other * turn[1];
  }
  __device__ __forceinline__ float& rstd() const { return side.rstd[int64_t(row) * (columns_of(p) / p.width) + group]; }
};

template <bool kBackward>
__global__ void __launch_bounds__(kQkScalarThreads) qk_scalar_kernel(const __grid_constant__ QkParams p) {
  const QkSide& side = p.sides[blockIdx.y];
  const int lane = threadIdx.x & 31, num_warps = kQkScalarThreads / 32, num_groups = columns_of(p) / p.width;
  const int64_t num_norms = int64_t(side.num_rows) * num_groups;
  for (int64_t i = int64_t(blockIdx.x) * num_warps + (threadIdx.x >> 5); i < num_norms; i += gridDim.x * num_warps) {
    const QkNorm norm{p, side, int(i / num_groups), int(i % num_groups)};
    float total = 0.0f;
    if constexpr (!kBackward) {
      for (int column = lane; column < p.width; column += 32) {
        const float x = norm.read(side.x, column);
        total += x * x;
      }
      const float rstd = 1.0f / sqrtf(warp_sum(total) / float(p.width) + p.eps);
      if (lane == 0) norm.rstd() = rstd;
      for (int column = lane; column < p.width; column += 32) {
        float value = norm.normalised(column, rstd);
        if (p.rotary != nullptr) value = norm.turned(value, norm.normalised(column ^ 1, rstd), column, 1.0f);
        store_any(side.out.data, p.dtype, norm.index(side.out, column), value);
      }
    } else {
      const float rstd = norm.rstd();
      for (int column = lane; column < p.width; column += 32) {
        total += norm.grad(column) * norm.normalised(column, rstd);
      }
      const float mean = warp_sum(total) / float(p.width);
      for (int column = lane; column < p.width; column += 32) {
        const float n = norm.read(side.x, column) * rstd;
        const float dx = rstd * (norm.grad(column) * norm.weight(column) - n * mean);
        store_any(side.dx.data, p.dtype, norm.index(side.dx, column), dx);
      }
    }
  }
}

// The weight's gradient for the scalar path: grid (column tile, block of rows), a thread is bound to one column.
constexpr int kQkColumnThreads = 128;

__global__ void __launch_bounds__(kQkColumnThreads) qk_column_kernel(const __grid_constant__ QkParams p) {
  int block = blockIdx.y;
  const QkSide& side = side_of(p, block);
  const int column = blockIdx.x * kQkColumnThreads + threadIdx.x;
  if (column >= p.width) return;
  const int end_row = min((block + 1) * p.rows_per_block, side.num_rows);
  float total = 0.0f;
  for (int row = block * p.rows_per_block; row < end_row; ++row) {
    for (int group = 0; group < columns_of(p) / p.width; ++group) {
      const QkNorm norm{p, side, row, group};
      total += norm.grad(column) * norm.read(side.x, column) * norm.rstd();
    }
  }
  side.partials[int64_t(block) * p.width + column] = total;
}

}  // namespace adaln
