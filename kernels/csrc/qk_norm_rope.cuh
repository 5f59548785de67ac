// RMSNorm of queries and keys, and the rotation of neighbouring pairs behind it.
//
// A thread owns the same columns of every row, a block walks down its rows of q or of k. The next rows are on their
// way to shared memory meanwhile. The norm runs over all D = heads * head_dim columns, or over each head by itself.
#pragma once

#include "device.cuh"

namespace adaln {

// A [rows, heads, head_dim] tensor whose last stride is 1, or none (`data` is null). Strides in elements.
struct Heads {
  void* data;
  int64_t row_stride;
  int64_t head_stride;
};

// Mirrored field by field in kernels/qk_extension.py, as are QkParams.
struct QkSide {
  Heads x;              // as given
  Heads out;            // result; in backward its gradient
  Heads dx;
  const void* weight;   // [width]
  void* dweight;        // [width], in the dtype of the weight
  float* rstd;          // [rows, D / width]
  float* partials;      // [num_blocks, width]: of the weight's gradient; null: not wanted
  int32_t weight_dtype;
  int32_t num_rows;
  int32_t num_blocks;
  int32_t unused;
};

struct QkParams {
  QkSide sides[2];       // q, k
  const float* rotary;   // cosine and sine [rotary_rows, head_dim / 2, 2]; null: no rotation
  int32_t rotary_rows;   // row n of a tensor turns by row n % rotary_rows
  int32_t num_heads;
  int32_t head_dim;
  int32_t width;         // columns of one norm: D or head_dim
  int32_t rows_per_block;
  int32_t dtype;         // of q, k and all that has their shape
  int32_t vectors;       // groups of eight columns a thread owns
  int32_t rows;          // rows that share a barrier
  float eps;
  int32_t device;
};

__host__ __device__ __forceinline__ int columns_of(const QkParams& p) { return p.num_heads * p.head_dim; }

// The blocks of q come first.
__device__ __forceinline__ const QkSide& side_of(const QkParams& p, int& block) {
  const bool is_key = block >= p.sides[0].num_blocks;
  if (is_key) block -= p.sides[0].num_blocks;
  return p.sides[is_key ? 1 : 0];
}

// ---- fast kernels: head_dim a multiple of 8, rows and heads aligned to 16 bytes --------------------------------------
//
// V vectors a thread, at the same place in heads that lie D / V apart: one turn serves them. R rows between barriers.

// What a thread needs of each tensor and of each row on its way, copied and read by that thread: no barrier.
template <class T, int V, int kTensors, int kStages> struct Ring {
  static constexpr int kParts = sizeof(T) / 2;  // 16 bytes each
  unsigned char* base;

  static __host__ __device__ int bytes(int num_threads) { return kStages * kTensors * V * kParts * 16 * num_threads; }

  __device__ __forceinline__ unsigned char* at(int stage, int tensor, int v, int part) const {
    return base + ((((stage * kTensors + tensor) * V + v) * kParts + part) * int(blockDim.x) + int(threadIdx.x)) * 16;
  }
  __device__ __forceinline__ void copy(int stage, int tensor, int v, const T* source) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      copy_async_16(at(stage, tensor, v, part), source + part * 16 / int(sizeof(T)));
    }
  }
  __device__ __forceinline__ void read(int stage, int tensor, int v, float (&out)[kVector]) const {
    alignas(16) uint4 bits[kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part) bits[part] = *reinterpret_cast<const uint4*>(at(stage, tensor, v, part));
    load_vector(reinterpret_cast<const T*>(bits), out);
  }
};

// Cosine and sine of a thread's four pairs.
struct Turn {
  float4 halves[2];

  __device__ __forceinline__ void load(const QkParams& p, int rotary_row, int column_in_head) {
    const float* source = p.rotary + int64_t(rotary_row) * p.head_dim + column_in_head;
    CHECK_ALIGNED(source, 16);
    halves[0] = reinterpret_cast<const float4*>(source)[0];
    halves[1] = reinterpret_cast<const float4*>(source)[1];
  }

  // By the angle times `sign`.
  __device__ __forceinline__ void apply(float (&values)[kVector], float sign) const {
#pragma unroll
    for (int i = 0; i < kVector; i += 2) {
      const float4& half = halves[i / 4];
      const float cosine = i % 4 == 0 ? half.x : half.z, sine = sign * (i % 4 == 0 ? half.y : half.w);
      const float first = values[i], second = values[i + 1];
      values[i] = first * cosine - second * sine;
      values[i + 1] = first * sine + second * cosine;
    }
  }
};

template <class T, bool kPerHead, bool kBackward, int V, int R> struct QkWalk {
  static constexpr int kStages = 4;
  static constexpr int kSums = kPerHead ? R * V : R;  // norms that a thread takes part in
  using Rows = Ring<T, V, kBackward ? 2 : 1, kStages>;

  const QkParams& p;
  const QkSide& side;
  Rows ring;
  int block, column, head, column_in_head, num_groups, row, end_row, rotary_row;
  bool active, is_first_of_group;

  __device__ __forceinline__ QkWalk(const QkParams& params, int flat_block, unsigned char* shared)
      : p(params), side(side_of(params, flat_block)), ring{shared}, block(flat_block) {
    column = int(threadIdx.x) * kVector;
    active = column < columns_of(p) / V;
    head = column / p.head_dim;
    column_in_head = column % p.head_dim;
    num_groups = kPerHead ? p.num_heads : 1;
    is_first_of_group = active && (kPerHead ? column_in_head == 0 : threadIdx.x == 0);
    row = block * p.rows_per_block;
    end_row = min(row + p.rows_per_block, side.num_rows);
    rotary_row = row % p.rotary_rows;
    for (int stage = 0; stage < kStages; ++stage) copy(stage, row + stage);
  }

  __device__ __forceinline__ int head_of(int v) const { return head + v * (p.num_heads / V); }
  __device__ __forceinline__ int column_of(int v) const { return column + v * (columns_of(p) / V); }
  __device__ __forceinline__ T* at(const Heads& tensor, int row, int v) const {
    return static_cast<T*>(tensor.data) + row * tensor.row_stride + head_of(v) * tensor.head_stride + column_in_head;
  }
  __device__ __forceinline__ float& rstd(int row, int v) const {
    return side.rstd[int64_t(row) * num_groups + (kPerHead ? head_of(v) : 0)];
  }

  __device__ __forceinline__ void read_weight(float (&weight)[V][kVector]) const {
#pragma unroll
    for (int v = 0; v < V; ++v) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const int of_norm = (kPerHead ? column_in_head : column_of(v)) + i;
        weight[v][i] = active ? load_any(side.weight, side.weight_dtype, of_norm) : 0.0f;
      }
    }
  }

  __device__ __forceinline__ void copy(int stage, int source) const {
    if (active && source < end_row) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        ring.copy(stage, 0, v, at(side.x, source, v));
        if constexpr (kBackward) ring.copy(stage, 1, v, at(side.out, source, v));
      }
    }
    commit_copies();
  }

  // The turns of the next R rows: asked for before the rows are waited for.
  __device__ __forceinline__ void load_turns(Turn (&turns)[R]) {
    if (p.rotary == nullptr) return;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (active && row + r < end_row) turns[r].load(p, rotary_row, column_in_head);
      rotary_row = rotary_row + 1 == p.rotary_rows ? 0 : rotary_row + 1;
    }
  }

  // R rows of every tensor.
  __device__ __forceinline__ void read(int stage, float (&x)[R][V][kVector], float (&dout)[R][V][kVector]) const {
    wait_copies<kStages - R>();
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const bool is_there = active && row + r < end_row;
#pragma unroll
      for (int v = 0; v < V; ++v) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) x[r][v][i] = dout[r][v][i] = 0.0f;
        if (is_there) {
          ring.read(stage + r, 0, v, x[r][v]);
          if constexpr (kBackward) ring.read(stage + r, 1, v, dout[r][v]);
        }
      }
    }
  }

  // Starts the copies of the rows that take their places.
  __device__ __forceinline__ void copy_next(int stage) const {
#pragma unroll
    for (int r = 0; r < R; ++r) copy(stage + r, row + r + kStages);
  }

  // The sums over what is normalised together, in a fixed order. At most one barrier; `parity` alternates.
  __device__ __forceinline__ void sum(float (&values)[kSums], float (&of_warps)[2][R * kMaxWarps], int parity) const {
    if constexpr (!kPerHead) {
      block_sum<kSums>(values, of_warps[parity]);
    } else {
      const int lanes = p.head_dim / kVector;
      if (lanes <= 32 && (lanes & (lanes - 1)) == 0) {  // a head lies within a warp
        for (int bit = 1; bit < lanes; bit *= 2) {
#pragma unroll
          for (int m = 0; m < kSums; ++m) values[m] += __shfl_xor_sync(kAllLanes, values[m], bit);
        }
        return;
      }
      __shared__ float parts[2][kSums][kMaxThreads];
#pragma unroll
      for (int m = 0; m < kSums; ++m) parts[parity][m][threadIdx.x] = values[m];
      __syncthreads();
      if (!active) return;
#pragma unroll
      for (int m = 0; m < kSums; ++m) {
        const float* first = parts[parity][m] + head * lanes;
        values[m] = 0.0f;
        for (int i = 0; i < lanes; ++i) values[m] += first[i];
      }
    }
  }

  __device__ __forceinline__ void advance(int& stage, int& parity) {
    row += R;
    stage = stage + R == kStages ? 0 : stage + R;
    parity ^= 1;
  }
};

// Registers of a multiprocessor must serve so many threads: two blocks of 320.
constexpr int kQkThreads = 640;

template <class T, bool kPerHead, int V, int R>
__global__ void __launch_bounds__(kQkThreads) qk_forward_kernel(const __grid_constant__ QkParams p) {
  DYNAMIC_SHARED(shared);
  __shared__ float of_warps[2][R * kMaxWarps];
  using Walk = QkWalk<T, kPerHead, false, V, R>;
  Walk walk(p, blockIdx.x, shared);
  const QkSide& side = walk.side;
  float weight[V][kVector];
  walk.read_weight(weight);
  clear(of_warps[0]);
  clear(of_warps[1]);
  const float one_over_width = 1.0f / float(p.width);
  for (int stage = 0, parity = 0; walk.row < walk.end_row; walk.advance(stage, parity)) {
    Turn turns[R] = {};
    float x[R][V][kVector], none[R][V][kVector], squares[Walk::kSums] = {};
    walk.load_turns(turns);
    walk.read(stage, x, none);
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) squares[kPerHead ? r * V + v : r] += x[r][v][i] * x[r][v][i];
      }
    }
    walk.copy_next(stage);
    walk.sum(squares, of_warps, parity);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (walk.row + r >= walk.end_row) break;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const float rstd = rsqrtf(squares[kPerHead ? r * V + v : r] * one_over_width + p.eps);
#pragma unroll
        for (int i = 0; i < kVector; ++i) x[r][v][i] = x[r][v][i] * rstd * weight[v][i];
        if (p.rotary != nullptr) turns[r].apply(x[r][v], 1.0f);
        store_vector(walk.at(side.out, walk.row + r, v), x[r][v], walk.active);
        if (walk.is_first_of_group && (kPerHead || v == 0)) walk.rstd(walk.row + r, v) = rstd;
      }
    }
  }
}

// With n = x * rstd, g the gradient turned back, and u = g * weight:
//   dx = rstd * (u - n * mean(u * n)),   dweight = sum over rows, and over heads where each has its own norm, of g * n.
template <class T, bool kPerHead, int V, int R>
__global__ void __launch_bounds__(kQkThreads) qk_backward_kernel(const __grid_constant__ QkParams p) {
  DYNAMIC_SHARED(shared);
  __shared__ float of_warps[2][R * kMaxWarps];
  using Walk = QkWalk<T, kPerHead, true, V, R>;
  Walk walk(p, blockIdx.x, shared);
  const QkSide& side = walk.side;
  float weight[V][kVector], dweight[V][kVector] = {};
  walk.read_weight(weight);
  clear(of_warps[0]);
  clear(of_warps[1]);
  const float one_over_width = 1.0f / float(p.width);
  for (int stage = 0, parity = 0; walk.row < walk.end_row; walk.advance(stage, parity)) {
    Turn turns[R] = {};
    float normalised[R][V][kVector], grad[R][V][kVector], rstd[R][V], along[Walk::kSums] = {};
    walk.load_turns(turns);
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        rstd[r][v] = walk.active && walk.row + r < walk.end_row ? walk.rstd(walk.row + r, v) : 0.0f;
      }
    }
    walk.read(stage, normalised, grad);
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (p.rotary != nullptr) turns[r].apply(grad[r][v], -1.0f);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          normalised[r][v][i] *= rstd[r][v];
          dweight[v][i] += grad[r][v][i] * normalised[r][v][i];
          grad[r][v][i] *= weight[v][i];
          along[kPerHead ? r * V + v : r] += grad[r][v][i] * normalised[r][v][i];
        }
      }
    }
    walk.sum(along, of_warps, parity);
    walk.copy_next(stage);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (walk.row + r >= walk.end_row) break;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const float mean = along[kPerHead ? r * V + v : r] * one_over_width;
#pragma unroll
        for (int i = 0; i < kVector; ++i) grad[r][v][i] = rstd[r][v] * (grad[r][v][i] - normalised[r][v][i] * mean);
        store_vector(walk.at(side.dx, walk.row + r, v), grad[r][v], walk.active);
      }
    }
  }
  if (side.partials == nullptr) return;
  float* partials = side.partials + int64_t(walk.block) * p.width;
  // One norm a row: a thread's columns are its own. A norm a head: the heads' sums meet in [heads, head_dim] of the ring.
  float* target = kPerHead ? reinterpret_cast<float*>(shared) : partials;
  if constexpr (kPerHead) __syncthreads();  // the ring has been read
#pragma unroll
  for (int v = 0; v < V; ++v) store_vector(target + walk.column_of(v), dweight[v], walk.active);
  if constexpr (kPerHead) {
    __syncthreads();
    for (int column = threadIdx.x; column < p.head_dim; column += blockDim.x) {
      float total = 0.0f;
      for (int head = 0; head < p.num_heads; ++head) total += target[head * p.head_dim + column];
      partials[column] = total;
    }
  }
}

// ---- the end of backward: add what the blocks left, in a fixed order. Grid (column tile, q or k). --------------------

constexpr int kQkFinishSide = 32;

__global__ void __launch_bounds__(kQkFinishSide* kQkFinishSide) qk_finish_kernel(const __grid_constant__ QkParams p) {
  __shared__ float parts[kQkFinishSide][kQkFinishSide];
  const QkSide& side = p.sides[blockIdx.y];
  const int column = blockIdx.x * kQkFinishSide + threadIdx.x;
  float total = 0.0f;
  if (column < p.width) {
    for (int block = threadIdx.y; block < side.num_blocks; block += kQkFinishSide) {
      total += side.partials[int64_t(block) * p.width + column];
    }
  }
  parts[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y != 0 || column >= p.width) return;
  for (int i = 1; i < kQkFinishSide; ++i) total += parts[i][threadIdx.x];
  store_any(side.dweight, side.weight_dtype, column, total);
}

}  // namespace adaln
