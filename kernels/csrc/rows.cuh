// The fast kernels: a thread owns the same columns of every row, a block walks down its rows.
//
// Rows are on their way in a ring of shared memory, filled by asynchronous copies that cost no registers. Every warp
// copies what it will read itself, so the ring needs no block barrier. Modulation and the column sums stay in registers.
#pragma once

#include "params.cuh"

namespace adaln {

// This thread's place in the block.
template <int V> struct Place {
  int lane, warp, num_warps;
  int column[V];   // first of eight
  bool active[V];  // D need not fill the last warp

  __device__ __forceinline__ explicit Place(int hidden_size)
      : lane(threadIdx.x & 31), warp(threadIdx.x >> 5), num_warps(blockDim.x >> 5) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      column[v] = (v * int(blockDim.x) + int(threadIdx.x)) * kVector;
      active[v] = column[v] < hidden_size;
    }
  }
};

template <class T> constexpr int kBytesPerThread = kVector * int(sizeof(T));

// One row of one tensor in a ring stage: V pieces of 32 * 8 elements for each warp.
template <class T, int V> struct RowBuffer {
  static __host__ __device__ int bytes(int num_threads) { return V * num_threads * kBytesPerThread<T>; }

  // Neighbouring lanes fetch neighbouring 16 bytes, also of float32, where a thread reads 32.
  static __device__ __forceinline__ void fetch(unsigned char* buffer, const Matrix& matrix, int row,
                                               const Place<V>& place, int hidden_size) {
    const T* source = static_cast<const T*>(matrix.data) + int64_t(row) * matrix.row_stride;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int piece = v * int(blockDim.x) + place.warp * 32;  // in threads
#pragma unroll
      for (int part = 0; part < kBytesPerThread<T> / 16; ++part) {
        const int offset = (part * 32 + place.lane) * 16;  // bytes into the piece
        const int column = piece * kVector + offset / int(sizeof(T));
        if (column < hidden_size) copy_async_16(buffer + piece * kBytesPerThread<T> + offset, source + column);
      }
    }
  }

  static __device__ __forceinline__ void read(const unsigned char* buffer, int v, const Place<V>& place,
                                              float (&out)[kVector]) {
    const int thread = v * int(blockDim.x) + int(threadIdx.x);
    if (place.active[v]) {
      load_vector(reinterpret_cast<const T*>(buffer + thread * kBytesPerThread<T>), out);
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) out[i] = 0.0f;
    }
  }
};

// Rows of this block, dealt out evenly.
__device__ __forceinline__ int first_row_of_block(const Params& p) { return int(blockIdx.x) * p.rows_per_block; }
__device__ __forceinline__ int end_row_of_block(const Params& p) {
  return min(first_row_of_block(p) + p.rows_per_block, p.num_rows);
}

template <int M> __device__ __forceinline__ void clear(float (*buffer)[kMaxWarps]) {
  for (int i = threadIdx.x; i < M * kMaxWarps; i += blockDim.x) {
    if (i % kMaxWarps >= int(blockDim.x >> 5)) buffer[i / kMaxWarps][i % kMaxWarps] = 0.0f;
  }
}

// ---- forward: x_out = x + gate * y, h = LayerNorm(x_out) * gain + offset --------------------------------------------

template <class X, class Y, class H, bool kAdd, int V, int R> struct Forward {
  using XRow = RowBuffer<X, V>;
  using YRow = RowBuffer<Y, V>;
  static constexpr int kThreads = V * R <= 2 ? kMaxThreads : 512;

  static __host__ __device__ int stage_bytes(const Params&, int num_threads) {
    return XRow::bytes(num_threads) + (kAdd ? YRow::bytes(num_threads) : 0);
  }

  static __device__ __forceinline__ void fetch(unsigned char* stage, const Params& p, int row, const Place<V>& place) {
    XRow::fetch(stage, p.x, row, place, p.hidden_size);
    if constexpr (kAdd) YRow::fetch(stage + XRow::bytes(blockDim.x), p.y, row, place, p.hidden_size);
  }

  static __device__ __forceinline__ void run(const Params& p, unsigned char* ring) {
    alignas(16) __shared__ float sums[2][R][kMaxWarps];
    const Place<V> place(p.hidden_size);
    const int bytes = stage_bytes(p, blockDim.x);
    const int end_row = end_row_of_block(p);
    int row = first_row_of_block(p);
    clear<2 * R>(sums[0]);

    for (int stage = 0; stage < p.stages; ++stage) {
      if (row + stage < end_row) fetch(ring + stage * bytes, p, row + stage, place);
      commit_copies();
    }

    float gain[V][kVector], offset[V][kVector], gate[kAdd ? V : 1][kVector];
    int segment = -1, segment_end = row, stage = 0;
    while (row < end_row) {
      if (row == segment_end) {
        segment = segment_of(p, row);
        segment_end = min(offsets_of(p)[segment + 1], end_row);
#pragma unroll
        for (int v = 0; v < V; ++v) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            gain[v][i] = place.active[v] ? gain_of(p, segment, place.column[v] + i) : 0.0f;
            offset[v][i] = place.active[v] ? offset_of(p, segment, place.column[v] + i) : 0.0f;
            if constexpr (kAdd) gate[v][i] = place.active[v] ? at_or(p.gate, segment, place.column[v] + i, 1.0f) : 0.0f;
          }
        }
      }
      const int num_rows = min(R, segment_end - row);
      wait_copies(p.stages - R);
      __syncwarp();  // the copies of the other lanes have arrived too

      float x[R][V][kVector], total[R];
      int slot[R];
#pragma unroll
      for (int r = 0; r < R; ++r) {
        total[r] = 0.0f;
        slot[r] = stage + r < p.stages ? stage + r : stage + r - p.stages;
        const unsigned char* buffer = ring + slot[r] * bytes;
#pragma unroll
        for (int v = 0; v < V; ++v) {
          if (r < num_rows) {
            XRow::read(buffer, v, place, x[r][v]);
            if constexpr (kAdd) {
              float y[kVector];
              YRow::read(buffer + XRow::bytes(blockDim.x), v, place, y);
#pragma unroll
              for (int i = 0; i < kVector; ++i) {
                // Rounded as it is stored, before the statistics: backward reads the stored one.
                x[r][v][i] = to_float(from_float<X>(x[r][v][i] + gate[v][i] * y[i]));
              }
              X* out = static_cast<X*>(p.x_out.data) + int64_t(row + r) * p.x_out.row_stride;
              store_vector(out + place.column[v], x[r][v], place.active[v]);
            }
          } else {
#pragma unroll
            for (int i = 0; i < kVector; ++i) x[r][v][i] = 0.0f;
          }
#pragma unroll
          for (int i = 0; i < kVector; ++i) total[r] += x[r][v][i];
        }
      }
      __syncwarp();  // all lanes have read what the next copies overwrite
#pragma unroll
      for (int r = 0; r < R; ++r) {
        if (r < num_rows) {
          const int next = row + r + p.stages;
          if (next < end_row) fetch(ring + slot[r] * bytes, p, next, place);
          commit_copies();
        }
      }

      block_sum<R>(total, sums[0], place.num_warps);
      float mean[R], square[R];
#pragma unroll
      for (int r = 0; r < R; ++r) {
        mean[r] = total[r] / float(p.hidden_size);
        square[r] = 0.0f;
#pragma unroll
        for (int v = 0; v < V; ++v) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            const float centred = x[r][v][i] - mean[r];
            square[r] += place.active[v] ? centred * centred : 0.0f;
          }
        }
      }
      block_sum<R>(square, sums[1], place.num_warps);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        if (r < num_rows) {
          const float rstd = 1.0f / sqrtf(square[r] / float(p.hidden_size) + p.eps);
          H* out = static_cast<H*>(p.h.data) + int64_t(row + r) * p.h.row_stride;
#pragma unroll
          for (int v = 0; v < V; ++v) {
            float h[kVector];
#pragma unroll
            for (int i = 0; i < kVector; ++i) h[i] = (x[r][v][i] - mean[r]) * rstd * gain[v][i] + offset[v][i];
            store_vector(out + place.column[v], h, place.active[v]);
          }
          if (threadIdx.x == 0) {
            p.mean[row + r] = mean[r];
            p.rstd[row + r] = rstd;
          }
        }
      }
      row += num_rows;
      stage = stage + num_rows < p.stages ? stage + num_rows : stage + num_rows - p.stages;
    }
  }
};

// ---- backward, one pass over x and dh -------------------------------------------------------------------------------
//
// With n = (x - mean) * rstd and g = dh * gain:
//   dx = dx_out + rstd * (g - mean(g) - n * mean(g * n)),   dy = gate * dx,
//   and over the rows of a segment the sums of dh * n, dh and y * dx.

template <class X, class Y, class H, bool kGate, int V, int R> struct Backward {
  using XRow = RowBuffer<X, V>;
  using YRow = RowBuffer<Y, V>;
  using HRow = RowBuffer<H, V>;
  static constexpr int kSums = kGate ? 3 : 2;
  static constexpr int kThreads = V * R <= (kGate ? 1 : 2) ? kMaxThreads : 384;

  // A stage holds mean and rstd of its row for every warp, then x, dh, y, dx_out.
  static __host__ __device__ int statistics_bytes(int num_threads) { return num_threads / 32 * 16; }
  static __host__ __device__ int stage_bytes(const Params& p, int num_threads) {
    return statistics_bytes(num_threads) + XRow::bytes(num_threads) + HRow::bytes(num_threads) +
           (kGate ? YRow::bytes(num_threads) : 0) + (p.x_out.data != nullptr ? XRow::bytes(num_threads) : 0);
  }

  static __device__ __forceinline__ void fetch(unsigned char* stage, const Params& p, int row, const Place<V>& place) {
    if (place.lane < 2) {
      copy_async_4(stage + place.warp * 16 + place.lane * 4, (place.lane == 0 ? p.mean : p.rstd) + row);
    }
    stage += statistics_bytes(blockDim.x);
    XRow::fetch(stage, p.x, row, place, p.hidden_size);
    stage += XRow::bytes(blockDim.x);
    HRow::fetch(stage, p.h, row, place, p.hidden_size);
    stage += HRow::bytes(blockDim.x);
    if constexpr (kGate) {
      YRow::fetch(stage, p.y, row, place, p.hidden_size);
      stage += YRow::bytes(blockDim.x);
    }
    if (p.x_out.data != nullptr) XRow::fetch(stage, p.x_out, row, place, p.hidden_size);
  }

  static __device__ __forceinline__ void run(const Params& p, unsigned char* ring) {
    alignas(16) __shared__ float buffers[2][2 * R][kMaxWarps];
    const Place<V> place(p.hidden_size);
    const int bytes = stage_bytes(p, blockDim.x);
    const int x_at = statistics_bytes(blockDim.x), h_at = x_at + XRow::bytes(blockDim.x);
    const int y_at = h_at + HRow::bytes(blockDim.x), x_out_at = y_at + (kGate ? YRow::bytes(blockDim.x) : 0);
    const int end_row = end_row_of_block(p);
    int row = first_row_of_block(p);
    clear<4 * R>(buffers[0]);

    for (int stage = 0; stage < p.stages; ++stage) {
      if (row + stage < end_row) fetch(ring + stage * bytes, p, row + stage, place);
      commit_copies();
    }

    float gain[V][kVector], gate[kGate ? V : 1][kVector], sums[V][kSums][kVector];
    int segment = -1, segment_end = row, stage = 0, parity = 0;
    bool is_first = true;
    while (row < end_row) {
      if (row == segment_end) {
        segment = segment_of(p, row);
        segment_end = min(offsets_of(p)[segment + 1], end_row);
#pragma unroll
        for (int v = 0; v < V; ++v) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            gain[v][i] = place.active[v] ? gain_of(p, segment, place.column[v] + i) : 0.0f;
            if constexpr (kGate) gate[v][i] = place.active[v] ? at(p.gate, segment, place.column[v] + i) : 0.0f;
#pragma unroll
            for (int k = 0; k < kSums; ++k) sums[v][k][i] = 0.0f;
          }
        }
      }
      const int num_rows = min(R, segment_end - row);
      wait_copies(p.stages - R);
      __syncwarp();

      float mean[R], rstd[R], totals[2 * R];
      int slot[R];
#pragma unroll
      for (int r = 0; r < R; ++r) {
        totals[2 * r] = totals[2 * r + 1] = 0.0f;
        slot[r] = stage + r < p.stages ? stage + r : stage + r - p.stages;
        const unsigned char* buffer = ring + slot[r] * bytes;
        if (r < num_rows) {
          const float* statistics = reinterpret_cast<const float*>(buffer + place.warp * 16);
          mean[r] = statistics[0];
          rstd[r] = statistics[1];
#pragma unroll
          for (int v = 0; v < V; ++v) {
            float x[kVector], dh[kVector];
            XRow::read(buffer + x_at, v, place, x);
            HRow::read(buffer + h_at, v, place, dh);
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
              const float normalised = (x[i] - mean[r]) * rstd[r];
              const float g = dh[i] * gain[v][i];
              totals[2 * r] += g;
              totals[2 * r + 1] += g * normalised;
              sums[v][0][i] += dh[i] * normalised;
              sums[v][1][i] += dh[i];
            }
          }
        }
      }
      block_sum<2 * R>(totals, buffers[parity], place.num_warps);
      parity ^= 1;

#pragma unroll
      for (int r = 0; r < R; ++r) {
        if (r < num_rows) {
          const unsigned char* buffer = ring + slot[r] * bytes;
          const float mean_g = totals[2 * r] / float(p.hidden_size);
          const float mean_gn = totals[2 * r + 1] / float(p.hidden_size);
          if (p.row_sums != nullptr && threadIdx.x == 0) {
            p.row_sums[2 * int64_t(row + r)] = mean_g;
            p.row_sums[2 * int64_t(row + r) + 1] = mean_gn;
          }
#pragma unroll
          for (int v = 0; v < V; ++v) {
            float x[kVector], dh[kVector], dx[kVector];
            XRow::read(buffer + x_at, v, place, x);
            HRow::read(buffer + h_at, v, place, dh);
            if (p.x_out.data != nullptr) {
              XRow::read(buffer + x_out_at, v, place, dx);
            } else {
#pragma unroll
              for (int i = 0; i < kVector; ++i) dx[i] = 0.0f;
            }
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
              const float normalised = (x[i] - mean[r]) * rstd[r];
              dx[i] += rstd[r] * (dh[i] * gain[v][i] - mean_g - normalised * mean_gn);
            }
            const int64_t target = int64_t(row + r) * p.dx.row_stride + place.column[v];
            store_vector(static_cast<X*>(p.dx.data) + target, dx, place.active[v]);
            if constexpr (kGate) {
              float y[kVector], dy[kVector];
              YRow::read(buffer + y_at, v, place, y);
#pragma unroll
              for (int i = 0; i < kVector; ++i) {
                sums[v][2][i] += y[i] * dx[i];
                dy[i] = gate[v][i] * dx[i];
              }
              store_vector(static_cast<Y*>(p.dy.data) + target, dy, place.active[v]);
            } else if (p.dy.data != nullptr) {
              store_vector(static_cast<Y*>(p.dy.data) + target, dx, place.active[v]);
            }
          }
        }
      }
      __syncwarp();
#pragma unroll
      for (int r = 0; r < R; ++r) {
        if (r < num_rows) {
          const int next = row + r + p.stages;
          if (next < end_row) fetch(ring + slot[r] * bytes, p, next, place);
          commit_copies();
        }
      }
      row += num_rows;
      stage = stage + num_rows < p.stages ? stage + num_rows : stage + num_rows - p.stages;

      if (row == segment_end) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          if (place.active[v]) hand_over(p, blockIdx.x, segment, is_first, place.column[v], sums[v]);
        }
        is_first = false;
      }
    }
  }
};

// The bound caps the registers: 96 for 640 threads, of which two blocks of 320 fit as well; more where 96 would
// spill.
template <class Kernel> __global__ void __launch_bounds__(Kernel::kThreads, 1) row_kernel(const __grid_constant__ Params p) {
  DYNAMIC_SHARED(ring);
  Kernel::run(p, ring);
}

}  // namespace adaln
