// The scalar path: any D, any mixture of dtypes, one block a row at a time.
#pragma once

#include "columns.cuh"

namespace adaln {

constexpr int kScalarThreads = 256;

template <int M> __device__ __forceinline__ void scalar_sum(float (&values)[M], float* buffer) {
  __syncthreads();  // the buffer's last sums have been read
  for (int i = threadIdx.x; i < M * kMaxWarps; i += blockDim.x) buffer[i] = 0.0f;
  __syncthreads();
  block_sum<M>(values, buffer);
}

__global__ void __launch_bounds__(kScalarThreads) scalar_forward_kernel(const __grid_constant__ Params p) {
  __shared__ float buffer[kMaxWarps];
  const Matrix& source = p.y.data != nullptr ? p.x_out : p.x;
  const int end_row = min((int(blockIdx.x) + 1) * p.rows_per_block, p.num_rows);
  for (int row = blockIdx.x * p.rows_per_block; row < end_row; ++row) {
    const int segment = segment_of(p, row);
    float total[1] = {}, square[1] = {};
    for (int column = threadIdx.x; column < p.hidden_size; column += kScalarThreads) {
      if (p.y.data != nullptr) {
        const float gate = at_or(p.gate, segment, column, 1.0f);
        put(p.x_out, row, column, read<Any>(p.x, row, column) + gate * read<Any>(p.y, row, column));
      }
      total[0] += read<Any>(source, row, column);
    }
    scalar_sum(total, buffer);
    const float mean = total[0] / float(p.hidden_size);
    for (int column = threadIdx.x; column < p.hidden_size; column += kScalarThreads) {
      const float centred = read<Any>(source, row, column) - mean;
      square[0] += centred * centred;
    }
    scalar_sum(square, buffer);
    const float rstd = 1.0f / sqrtf(square[0] / float(p.hidden_size) + p.eps);
    for (int column = threadIdx.x; column < p.hidden_size; column += kScalarThreads) {
      const float normalised = (read<Any>(source, row, column) - mean) * rstd;
      put(p.h, row, column, normalised * gain_of(p, segment, column) + offset_of(p, segment, column));
    }
    if (threadIdx.x == 0) {
      p.mean[row] = mean;
      p.rstd[row] = rstd;
    }
  }
}

// dx and dy; the sums over rows are the column kernel's.
__global__ void __launch_bounds__(kScalarThreads) scalar_backward_kernel(const __grid_constant__ Params p) {
  __shared__ float buffer[2 * kMaxWarps];
  const int end_row = min((int(blockIdx.x) + 1) * p.rows_per_block, p.num_rows);
  for (int row = blockIdx.x * p.rows_per_block; row < end_row; ++row) {
    const int segment = segment_of(p, row);
    const float mean = p.mean[row], rstd = p.rstd[row];
    float totals[2] = {};
    for (int column = threadIdx.x; column < p.hidden_size; column += kScalarThreads) {
      const float g = read<Any>(p.h, row, column) * gain_of(p, segment, column);
      totals[0] += g;
      totals[1] += g * ((read<Any>(p.x, row, column) - mean) * rstd);
    }
    scalar_sum(totals, buffer);
    const float mean_g = totals[0] / float(p.hidden_size), mean_gn = totals[1] / float(p.hidden_size);
    if (threadIdx.x == 0 && p.row_sums != nullptr) {
      p.row_sums[2 * int64_t(row)] = mean_g;
      p.row_sums[2 * int64_t(row) + 1] = mean_gn;
    }
    for (int column = threadIdx.x; column < p.hidden_size; column += kScalarThreads) {
      const float normalised = (read<Any>(p.x, row, column) - mean) * rstd;
      const float g = read<Any>(p.h, row, column) * gain_of(p, segment, column);
      const float dx = (p.x_out.data != nullptr ? read<Any>(p.x_out, row, column) : 0.0f) +
                       rstd * (g - mean_g - normalised * mean_gn);
      put(p.dx, row, column, dx);
      put(p.dy, row, column, at_or(p.gate, segment, column, 1.0f) * dx);
    }
  }
}

}  // namespace adaln
