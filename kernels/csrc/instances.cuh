// The fast kernels of one triple of dtypes. One .cu file a triple, so that they compile side by side.
#pragma once

#include "columns.cuh"
#include "rows.cuh"

namespace adaln {

// Vectors a thread, rows between barriers, stages: those that default_launches() in kernels/extension.py chooses from.
#ifndef ADALN_SWEEP
#define FOR_EACH_FORWARD_LAYOUT(macro) macro(1, 2, 2) macro(2, 2, 2) macro(2, 1, 4) macro(2, 2, 4)
#define FOR_EACH_BACKWARD_LAYOUT(macro) macro(1, 2, 4) macro(2, 1, 2)
#else  // and those that were measured and not kept
#define FOR_EACH_FORWARD_LAYOUT(macro) \
  macro(1, 1, 2) macro(1, 1, 4) macro(1, 2, 2) macro(1, 2, 4) macro(2, 1, 2) macro(2, 1, 4) macro(2, 2, 2) macro(2, 2, 4)
#define FOR_EACH_BACKWARD_LAYOUT(macro) FOR_EACH_FORWARD_LAYOUT(macro)
#endif

constexpr int kMaxRingBytes = 220 * 1024;  // of the 227 KB that a block may have on Hopper; the rest are the sums

// Launches, or, where `blocks_per_sm` is given, only says how many blocks a multiprocessor should have: as many as have
// `Kernel::kBytesUnderWay` in their rings together, if they fit. More only scatter the accesses to memory.
template <class Kernel, int V> int launch_rows(const Params& p, cudaStream_t stream, int* blocks_per_sm) {
  const int num_warps = (p.hidden_size + 32 * kVector * V - 1) / (32 * kVector * V);
  const int num_threads = 32 * num_warps, bytes = Kernel::kStages * Kernel::stage_bytes(p, num_threads);
  if (num_threads > kMaxThreads || num_threads > Kernel::kThreads || bytes > kMaxRingBytes) return kNoInstance;
  if (const int error = allow_shared_memory(row_kernel<Kernel>, bytes)) return error;
  if (blocks_per_sm != nullptr) {
    int fitting = 0;
    const cudaError_t failed =
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fitting, row_kernel<Kernel>, num_threads, bytes);
    *blocks_per_sm = min(fitting, max(1, (Kernel::kBytesUnderWay + bytes / 2) / bytes));
    return failed;
  }
  LAUNCH(row_kernel<Kernel>, dim3(p.num_blocks), dim3(num_threads), bytes, stream, p);
  return cudaGetLastError();
}

template <class X, class Y, class H>
int launch_rows(const Params& p, bool is_backward, cudaStream_t stream, int* blocks_per_sm) {
  const bool has_gate = p.gate.data != nullptr, adds = p.y.data != nullptr;
#define IS_LAYOUT(V, R, S) (p.vectors == V && p.rows == R && p.stages == S)
#define TRY_FORWARD(V, R, S) \
  if (!is_backward && IS_LAYOUT(V, R, S)) { \
    return adds ? launch_rows<Forward<X, Y, H, true, V, R, S>, V>(p, stream, blocks_per_sm) \
                : launch_rows<Forward<X, Y, H, false, V, R, S>, V>(p, stream, blocks_per_sm); \
  }
#define TRY_BACKWARD(V, R, S) \
  if (is_backward && IS_LAYOUT(V, R, S)) { \
    return has_gate ? launch_rows<Backward<X, Y, H, true, V, R, S>, V>(p, stream, blocks_per_sm) \
                    : launch_rows<Backward<X, Y, H, false, V, R, S>, V>(p, stream, blocks_per_sm); \
  }
  FOR_EACH_FORWARD_LAYOUT(TRY_FORWARD)
  FOR_EACH_BACKWARD_LAYOUT(TRY_BACKWARD)
#undef TRY_BACKWARD
#undef TRY_FORWARD
#undef IS_LAYOUT
  return kNoInstance;
}

template <class X, class Y, class H> int launch_columns(const Params& p, cudaStream_t stream) {
  const dim3 grid((p.hidden_size + kColumnThreads - 1) / kColumnThreads, p.num_blocks);
  if (p.gate.data != nullptr) LAUNCH((column_kernel<X, Y, H, true>), grid, dim3(kColumnThreads), 0, stream, p);
  else LAUNCH((column_kernel<X, Y, H, false>), grid, dim3(kColumnThreads), 0, stream, p);
  return cudaGetLastError();
}

// x, y, h. Without y the second does not matter: the first triple that fits the others is taken. Tests compile fewer.
#ifndef FOR_EACH_TRIPLE
#define FOR_EACH_TRIPLE(macro) \
  macro(bf16, bf16, bf16) macro(float, bf16, bf16) macro(float, float, float) macro(fp16, fp16, fp16) \
  macro(bf16, bf16, float) macro(float, bf16, float) macro(float, fp16, fp16)
#endif

#define DECLARE_TRIPLE(X, Y, H) \
  int rows_##X##_##Y##_##H(const Params&, bool is_backward, cudaStream_t, int* blocks_per_sm); \
  int columns_##X##_##Y##_##H(const Params&, cudaStream_t);
FOR_EACH_TRIPLE(DECLARE_TRIPLE)

#define DEFINE_TRIPLE(X, Y, H) \
  int rows_##X##_##Y##_##H(const Params& p, bool is_backward, cudaStream_t stream, int* blocks_per_sm) { \
    return launch_rows<X, Y, H>(p, is_backward, stream, blocks_per_sm); \
  } \
  int columns_##X##_##Y##_##H(const Params& p, cudaStream_t stream) { return launch_columns<X, Y, H>(p, stream); }

}  // namespace adaln
