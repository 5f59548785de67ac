// What a launch is told. Mirrored field by field in kernels/extension.py.
//
// N tokens, D hidden size, G segments. A segment is a run of tokens with one modulation row. Tokens are dealt out evenly:
// block i owns rows [i * rows_per_block, (i + 1) * rows_per_block), whatever the segments are. In forward there may be
// more rows than that, which are dealt out in further turns.
#pragma once

#include "device.cuh"

namespace adaln {

constexpr int kMaxInlineOffsets = 512;

// A [rows, D] tensor, or none (`data` is null). Strides in elements.
struct Matrix {
  void* data;
  int64_t row_stride;
  int64_t column_stride;  // 1 for tensors of tokens
  int64_t dtype;
};

struct Params {
  Matrix x;      // residual stream; in backward the one that was normalised
  Matrix y;      // sublayer output that is added to x
  Matrix h;      // result; in backward its gradient
  Matrix x_out;  // new residual stream; in backward the gradient that arrives through it
  Matrix dx, dy;
  Matrix gate, scale, shift;             // [G, D]
  Matrix weight, bias;                   // [D]: row stride 0
  Matrix dgate, dscale, dshift;          // [G, D]
  Matrix dweight, dbias;                 // [D]
  float* mean;                           // [N]
  float* rstd;                           // [N]
  float* row_sums;                       // [N, 2]: the two means that dx needs, for the column kernel
  float* partials;                       // [2 * num_blocks, num_sums, D]: of segments that cross a block's border
  float* affine_partials;                // [num_blocks, 2, D]
  const int32_t* offsets;                // [G + 1] on the device; null: inline_offsets
  int32_t num_rows;
  int32_t hidden_size;
  int32_t num_segments;
  int32_t num_blocks;
  int32_t rows_per_block;
  int32_t stages;   // rows on their way to a block, or being worked on
  int32_t vectors;  // groups of eight elements a thread owns of each row
  int32_t rows;     // rows that share a barrier
  float eps;
  int32_t device;
  int32_t inline_offsets[kMaxInlineOffsets];
};

__device__ __forceinline__ const int32_t* offsets_of(const Params& p) {
  return p.offsets != nullptr ? p.offsets : p.inline_offsets;
}

// The segment of a row: the last one that starts at or before it, so empty segments are skipped.
__device__ __forceinline__ int segment_of(const Params& p, int row) {
  const int32_t* offsets = offsets_of(p);
  int low = 0, high = p.num_segments - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (offsets[middle] <= row) low = middle;
    else high = middle - 1;
  }
  return low;
}

__device__ __forceinline__ float at(const Matrix& matrix, int64_t row, int64_t column) {
  return load_any(matrix.data, matrix.dtype, row * matrix.row_stride + column * matrix.column_stride);
}

__device__ __forceinline__ float at_or(const Matrix& matrix, int64_t row, int64_t column, float absent) {
  return matrix.data != nullptr ? at(matrix, row, column) : absent;
}

__device__ __forceinline__ void put(const Matrix& matrix, int64_t row, int64_t column, float value) {
  if (matrix.data != nullptr) store_any(matrix.data, matrix.dtype, row * matrix.row_stride + column, value);
}

// h = normalised * gain + offset, where gain and offset join affine part and modulation.
__device__ __forceinline__ float gain_of(const Params& p, int segment, int column) {
  return at_or(p.weight, 0, column, 1.0f) * (1.0f + at_or(p.scale, segment, column, 0.0f));
}
__device__ __forceinline__ float offset_of(const Params& p, int segment, int column) {
  return at_or(p.bias, 0, column, 0.0f) * (1.0f + at_or(p.scale, segment, column, 0.0f)) +
         at_or(p.shift, segment, column, 0.0f);
}

// Eight neighbouring columns at once, in 16-byte reads where the rows allow it.
__device__ __forceinline__ void vector_at_or(const Matrix& matrix, int64_t row, int column, float absent,
                                             float (&out)[kVector]) {
  const int64_t index = row * matrix.row_stride + column;
  const int bytes = matrix.dtype == kFloat32 ? 4 : 2;
  if (matrix.data == nullptr) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) out[i] = absent;
  } else if (matrix.column_stride != 1 || (reinterpret_cast<uintptr_t>(matrix.data) + index * bytes) % 16 != 0) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) out[i] = at(matrix, row, column + i);
  } else if (matrix.dtype == kFloat32) {
    load_vector(static_cast<const float*>(matrix.data) + index, out);
  } else if (matrix.dtype == kBFloat16) {
    load_vector(static_cast<const bf16*>(matrix.data) + index, out);
  } else {
    load_vector(static_cast<const fp16*>(matrix.data) + index, out);
  }
}

__device__ __forceinline__ void gains_of(const Params& p, int segment, int column, float (&gain)[kVector]) {
  float scale[kVector];
  vector_at_or(p.weight, 0, column, 1.0f, gain);
  vector_at_or(p.scale, segment, column, 0.0f, scale);
#pragma unroll
  for (int i = 0; i < kVector; ++i) gain[i] *= 1.0f + scale[i];
}
__device__ __forceinline__ void offsets_of_columns(const Params& p, int segment, int column, float (&offset)[kVector]) {
  float scale[kVector], bias[kVector];
  vector_at_or(p.shift, segment, column, 0.0f, offset);
  if (p.bias.data == nullptr) return;
  vector_at_or(p.bias, 0, column, 0.0f, bias);
  vector_at_or(p.scale, segment, column, 0.0f, scale);
#pragma unroll
  for (int i = 0; i < kVector; ++i) offset[i] = bias[i] * (1.0f + scale[i]) + offset[i];
}

// ---- sums over the rows of a segment --------------------------------------------------------------------------------
//
// For every column: sums[0] of dh * normalised, sums[1] of dh, sums[2] of y * dx_out (with a gate only).

// Gradients of the modulation of one segment, from its finished sums.
__device__ __forceinline__ void put_modulation_gradients(const Params& p, int segment, int column, const float* sums,
                                                         int num_sums) {
  put(p.dscale, segment, column,
      sums[0] * at_or(p.weight, 0, column, 1.0f) + sums[1] * at_or(p.bias, 0, column, 0.0f));
  put(p.dshift, segment, column, sums[1]);
  if (num_sums == 3) put(p.dgate, segment, column, sums[2]);
}

// What a thread hands over when its block leaves a segment: the sums of `width` neighbouring columns. A segment that lies
// inside the block is finished; of one that crosses the block's border the sums wait in a slot of their own: a block has
// at most two of those, its first and its last.
template <int num_sums, int width>
__device__ __forceinline__ void hand_over(const Params& p, int block, int segment, bool is_first, int column,
                                          const float (&sums)[num_sums][width]) {
  const int32_t* offsets = offsets_of(p);
  const int first_row = block * p.rows_per_block;
  const int end_row = min(first_row + p.rows_per_block, p.num_rows);
  if (offsets[segment] >= first_row && offsets[segment + 1] <= end_row) {
#pragma unroll
    for (int i = 0; i < width; ++i) {
      float of_column[num_sums];
#pragma unroll
      for (int k = 0; k < num_sums; ++k) of_column[k] = sums[k][i];
      put_modulation_gradients(p, segment, column + i, of_column, num_sums);
    }
  } else if (p.partials != nullptr) {
    const int64_t slot = 2 * int64_t(block) + (is_first ? 0 : 1);
#pragma unroll
    for (int k = 0; k < num_sums; ++k) {
      float* target = p.partials + (slot * num_sums + k) * p.hidden_size + column;
      if constexpr (width == kVector) store_vector(target, sums[k], true);
      else target[0] = sums[k][0];
    }
  }
  if (p.affine_partials != nullptr) {
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const float factor = 1.0f + at_or(p.scale, segment, column + i, 0.0f);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float* sum = p.affine_partials + (2 * int64_t(block) + k) * p.hidden_size + column + i;
        *sum = (is_first ? 0.0f : *sum) + factor * sums[k][i];
      }
    }
  }
}

}  // namespace adaln
