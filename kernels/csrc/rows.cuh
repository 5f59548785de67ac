// The fast kernels: a thread owns the same columns of every row, a block walks down its rows.
//
// Rows are on their way in a ring of shared memory, filled by asynchronous copies that cost no registers. Every warp
// copies what it will read itself, so the ring needs no block barrier. Modulation and the column sums stay in registers
// while the rows of one segment pass.
#pragma once

#include "params.cuh"

namespace adaln {

// This thread's place in the block: a warp owns V * 256 neighbouring columns, a thread V times eight of them.
template <int V> struct Place {
  int lane, warp;
  int column[V];   // first of eight
  bool active[V];  // D need not fill the last warp

  __device__ __forceinline__ explicit Place(int hidden_size)
      : lane(threadIdx.x & 31), warp(threadIdx.x >> 5) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      column[v] = ((warp * V + v) * 32 + lane) * kVector;
      active[v] = column[v] < hidden_size;
    }
  }
};

// One row of one tensor in a stage of the ring, as it lies in memory.
template <class T, int V> struct RowBuffer {
  static __host__ __device__ int bytes(int num_threads) { return num_threads * V * kVector * int(sizeof(T)); }

  // Neighbouring lanes fetch neighbouring 16 bytes, also of float32, where a thread reads 32.
  static __device__ __forceinline__ void fetch(unsigned char* buffer, const Matrix& matrix, int row,
                                               const Place<V>& place, int hidden_size) {
    const T* source = static_cast<const T*>(matrix.data) + int64_t(row) * matrix.row_stride;
    constexpr int kPieces = V * kVector * int(sizeof(T)) / 16;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int column = ((place.warp * kPieces + piece) * 32 + place.lane) * (16 / int(sizeof(T)));
      if (column < hidden_size) copy_async_16(buffer + column * sizeof(T), source + column);
    }
  }

  // Columns beyond D, that no copy writes, are zero from the start: reads need no test.
  static __device__ __forceinline__ void clear_rest(unsigned char* buffer, const Place<V>& place) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const float zeros[kVector] = {};
      store_vector(reinterpret_cast<T*>(buffer) + place.column[v], zeros, !place.active[v]);
    }
  }

  static __device__ __forceinline__ void read(const unsigned char* buffer, int v, const Place<V>& place,
                                              float (&out)[kVector]) {
    load_vector(reinterpret_cast<const T*>(buffer) + place.column[v], out);
  }
};

// The rows of this block in order: `rows_per_block` neighbours, then those that many blocks further on, while there are
// any. Where there is one such turn only, a block has neighbouring rows alone.
struct Walk {
  int row, left;

  __device__ __forceinline__ explicit Walk(const Params& p)
      : row(int(blockIdx.x) * p.rows_per_block), left(p.rows_per_block) {}

  __device__ __forceinline__ void advance(const Params& p, int num_rows) {  // at most `left`
    row += num_rows;
    left -= num_rows;
    if (left == 0) {
      row += (int(gridDim.x) - 1) * p.rows_per_block;
      left = p.rows_per_block;
    }
  }
};

// The stage `ahead` places on in a ring of S.
template <int S> __device__ __forceinline__ int next_stage(int stage, int ahead) {
  stage += ahead;
  return stage < S ? stage : stage - S;
}

// ---- forward: x_out = x + gate * y, h = LayerNorm(x_out) * gain + offset --------------------------------------------
//
// V vectors a thread, R rows between barriers, S stages of the ring.

template <class X, class Y, class H, bool kAdd, int V, int R, int S> struct Forward {
  using XRow = RowBuffer<X, V>;
  using YRow = RowBuffer<Y, V>;
  static constexpr int kStages = S;
  static constexpr int kThreads = V * R <= 2 ? 640 : 512;
  static constexpr int kBytesUnderWay = 40 * 1024;

  static __host__ __device__ int stage_bytes(const Params&, int num_threads) {
    return XRow::bytes(num_threads) + (kAdd ? YRow::bytes(num_threads) : 0);
  }

  static __device__ __forceinline__ void fetch(unsigned char* stage, const Params& p, int row, const Place<V>& place) {
    XRow::fetch(stage, p.x, row, place, p.hidden_size);
    if constexpr (kAdd) YRow::fetch(stage + XRow::bytes(blockDim.x), p.y, row, place, p.hidden_size);
  }

  static __device__ __forceinline__ void clear_rest(unsigned char* stage, const Params&, const Place<V>& place) {
    XRow::clear_rest(stage, place);
    if constexpr (kAdd) YRow::clear_rest(stage + XRow::bytes(blockDim.x), place);
  }

  static __device__ __forceinline__ void run(const Params& p, unsigned char* ring) {
    __shared__ float sums[2][R * kMaxWarps];
    const Place<V> place(p.hidden_size);
    const int bytes = stage_bytes(p, blockDim.x);
    const float inverse_size = 1.0f / float(p.hidden_size);
    Walk now(p), ahead(p);  // what is computed, and what is fetched
    int stage = 0;
    clear(sums[0]);
    clear(sums[1]);
#pragma unroll
    for (int i = 0; i < S; ++i) {
      clear_rest(ring + i * bytes, p, place);
      if (ahead.row < p.num_rows) fetch(ring + i * bytes, p, ahead.row, place);
      commit_copies();
      ahead.advance(p, 1);
    }

    while (now.row < p.num_rows) {
      const int segment = segment_of(p, now.row), segment_end = offsets_of(p)[segment + 1];
      float gain[V][kVector], offset[V][kVector], gate[kAdd ? V : 1][kVector];
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (place.active[v]) {
          gains_of(p, segment, place.column[v], gain[v]);
          offsets_of_columns(p, segment, place.column[v], offset[v]);
          if constexpr (kAdd) vector_at_or(p.gate, segment, place.column[v], 1.0f, gate[v]);
        } else {
#pragma unroll
          for (int i = 0; i < kVector; ++i) gain[v][i] = offset[v][i] = gate[kAdd ? v : 0][i] = 0.0f;
        }
      }

#pragma unroll 1
      while (now.row < segment_end) {
        const int num_rows = R == 1 ? 1 : min(R, min(segment_end - now.row, now.left));
        wait_copies<S - R>();
        __syncwarp();  // the copies of the other lanes have arrived too

        float x[R][V][kVector], total[R], square[R];
#pragma unroll
        for (int r = 0; r < R; ++r) {
          total[r] = 0.0f;
          const unsigned char* buffer = ring + next_stage<S>(stage, r) * bytes;
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
                X* out = static_cast<X*>(p.x_out.data) + int64_t(now.row + r) * p.x_out.row_stride;
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
            if (ahead.row < p.num_rows) fetch(ring + next_stage<S>(stage, r) * bytes, p, ahead.row, place);
            commit_copies();
            ahead.advance(p, 1);
          }
        }

        block_sum<R>(total, sums[0]);
#pragma unroll
        for (int r = 0; r < R; ++r) {
          total[r] *= inverse_size;  // the mean
          square[r] = 0.0f;
#pragma unroll
          for (int v = 0; v < V; ++v) {
            float of_vector = 0.0f;
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
              x[r][v][i] -= total[r];
              of_vector += x[r][v][i] * x[r][v][i];
            }
            square[r] += place.active[v] ? of_vector : 0.0f;
          }
        }
        block_sum<R>(square, sums[1]);
#pragma unroll
        for (int r = 0; r < R; ++r) {
          if (r < num_rows) {
            const float rstd = rsqrtf(square[r] * inverse_size + p.eps);
            H* out = static_cast<H*>(p.h.data) + int64_t(now.row + r) * p.h.row_stride;
#pragma unroll
            for (int v = 0; v < V; ++v) {
              float h[kVector];
#pragma unroll
              for (int i = 0; i < kVector; ++i) h[i] = x[r][v][i] * rstd * gain[v][i] + offset[v][i];
              store_vector(out + place.column[v], h, place.active[v]);
            }
            if (threadIdx.x == 0) {
              p.mean[now.row + r] = total[r];
              p.rstd[now.row + r] = rstd;
            }
          }
        }
        now.advance(p, num_rows);
        stage = next_stage<S>(stage, num_rows);
      }
    }
  }
};

// ---- backward, one pass over x and dh -------------------------------------------------------------------------------
//
// With c = x - mean and g = dh * gain:
//   dx = dx_out + rstd * (g - mean(g) - c * rstd^2 * mean(g * c)),   dy = gate * dx,
//   and over the rows of a segment the sums of dh * c * rstd, dh and y * dx.

template <class X, class Y, class H, bool kGate, int V, int R, int S> struct Backward {
  using XRow = RowBuffer<X, V>;
  using YRow = RowBuffer<Y, V>;
  using HRow = RowBuffer<H, V>;
  static constexpr int kStages = S;
  static constexpr int kSums = kGate ? 3 : 2;
  static constexpr int kThreads = V * R <= (kGate || sizeof(X) == 4 ? 1 : 2) ? 640 : 384;
  static constexpr int kBytesUnderWay = 80 * 1024;

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

  static __device__ __forceinline__ void clear_rest(unsigned char* stage, const Params& p, const Place<V>& place) {
    stage += statistics_bytes(blockDim.x);
    XRow::clear_rest(stage, place);
    stage += XRow::bytes(blockDim.x);
    HRow::clear_rest(stage, place);
    stage += HRow::bytes(blockDim.x);
    if constexpr (kGate) {
      YRow::clear_rest(stage, place);
      stage += YRow::bytes(blockDim.x);
    }
    if (p.x_out.data != nullptr) XRow::clear_rest(stage, place);
  }

  static __device__ __forceinline__ void run(const Params& p, unsigned char* ring) {
    __shared__ float buffers[2][2 * R * kMaxWarps];
    const Place<V> place(p.hidden_size);
    const int bytes = stage_bytes(p, blockDim.x);
    const int x_at = statistics_bytes(blockDim.x), h_at = x_at + XRow::bytes(blockDim.x);
    const int y_at = h_at + HRow::bytes(blockDim.x), x_out_at = y_at + (kGate ? YRow::bytes(blockDim.x) : 0);
    const float inverse_size = 1.0f / float(p.hidden_size);
    int row = int(blockIdx.x) * p.rows_per_block;
    const int end_row = min(row + p.rows_per_block, p.num_rows);
    int stage = 0, parity = 0;
    bool is_first = true;
    clear(buffers[0]);
    clear(buffers[1]);
#pragma unroll
    for (int ahead = 0; ahead < S; ++ahead) {
      clear_rest(ring + ahead * bytes, p, place);
      if (row + ahead < end_row) fetch(ring + ahead * bytes, p, row + ahead, place);
      commit_copies();
    }

    while (row < end_row) {
      const int segment = segment_of(p, row), segment_end = min(offsets_of(p)[segment + 1], end_row);
      float gain[V][kVector], gate[kGate ? V : 1][kVector], sums[V][kSums][kVector];
#pragma unroll
      for (int v = 0; v < V; ++v) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          gain[v][i] = gate[kGate ? v : 0][i] = 0.0f;
#pragma unroll
          for (int k = 0; k < kSums; ++k) sums[v][k][i] = 0.0f;
        }
        if (place.active[v]) {
          gains_of(p, segment, place.column[v], gain[v]);
          if constexpr (kGate) vector_at_or(p.gate, segment, place.column[v], 0.0f, gate[v]);
        }
      }

#pragma unroll 1
      while (row < segment_end) {
        const int num_rows = R == 1 ? 1 : min(R, segment_end - row);
        wait_copies<S - R>();
        __syncwarp();

        float mean[R], rstd[R], totals[2 * R];
#pragma unroll
        for (int r = 0; r < R; ++r) {
          totals[2 * r] = totals[2 * r + 1] = 0.0f;
          const unsigned char* buffer = ring + next_stage<S>(stage, r) * bytes;
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
                const float product = dh[i] * (x[i] - mean[r]);
                totals[2 * r] += dh[i] * gain[v][i];
                totals[2 * r + 1] += product * gain[v][i];
                sums[v][0][i] += product * rstd[r];
                sums[v][1][i] += dh[i];
              }
            }
          }
        }
        block_sum<2 * R>(totals, buffers[parity]);
        parity ^= 1;

#pragma unroll
        for (int r = 0; r < R; ++r) {
          if (r < num_rows) {
            const unsigned char* buffer = ring + next_stage<S>(stage, r) * bytes;
            const float mean_g = totals[2 * r] * inverse_size;
            const float mean_gn = totals[2 * r + 1] * rstd[r] * inverse_size;
            const float constant = -rstd[r] * mean_g, slope = -rstd[r] * rstd[r] * mean_gn;
            if (p.row_sums != nullptr && threadIdx.x == 0) {
              p.row_sums[2 * int64_t(row + r)] = mean_g;
              p.row_sums[2 * int64_t(row + r) + 1] = mean_gn;
            }
#pragma unroll
            for (int v = 0; v < V; ++v) {
              float x[kVector], dh[kVector], dx[kVector];
              XRow::read(buffer + x_at, v, place, x);
              HRow::read(buffer + h_at, v, place, dh);
#pragma unroll
              for (int i = 0; i < kVector; ++i) {
                dx[i] = rstd[r] * (dh[i] * gain[v][i]) + (slope * (x[i] - mean[r]) + constant);
              }
              if (p.x_out.data != nullptr) {
                XRow::read(buffer + x_out_at, v, place, x);
#pragma unroll
                for (int i = 0; i < kVector; ++i) dx[i] += x[i];
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
            if (row + r + S < end_row) fetch(ring + next_stage<S>(stage, r) * bytes, p, row + r + S, place);
            commit_copies();
          }
        }
        row += num_rows;
        stage = next_stage<S>(stage, num_rows);
      }

#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (place.active[v]) hand_over(p, blockIdx.x, segment, is_first, place.column[v], sums[v]);
      }
      is_first = false;
    }
  }
};

// Threads that a multiprocessor's registers must serve: 640 leave each 96, enough for all that do not spill with it; two
// blocks of 320 fit.
template <class Kernel> __global__ void __launch_bounds__(Kernel::kThreads, 1) row_kernel(const __grid_constant__ Params p) {
  DYNAMIC_SHARED(ring);
  Kernel::run(p, ring);
}

}  // namespace adaln
