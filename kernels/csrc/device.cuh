// What the kernels stand on: types, vector access, asynchronous copies, reductions.
//
// The same source runs on a GPU and, compiled by g++ with ADALN_EMULATE, on a CPU (tests/kernels/emulation).
#pragma once

#include <cstdint>

#ifdef ADALN_EMULATE
#include "emulate.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#define LAUNCH(kernel, grid, block, shared_bytes, stream, ...) kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)
#define CHECK_ALIGNED(pointer, bytes)
#endif

namespace adaln {

using bf16 = __nv_bfloat16;
using fp16 = __half;

enum Dtype : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
template <class T> constexpr int32_t kDtypeOf = kFloat32;
template <> constexpr int32_t kDtypeOf<bf16> = kBFloat16;
template <> constexpr int32_t kDtypeOf<fp16> = kFloat16;

constexpr unsigned kAllLanes = 0xffffffffu;

// ---- one element ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(bf16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float to_float(fp16 value) { return __half2float(value); }

template <class T> __device__ __forceinline__ T from_float(float value);
template <> __device__ __forceinline__ float from_float<float>(float value) { return value; }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float value) { return __float2bfloat16_rn(value); }
template <> __device__ __forceinline__ fp16 from_float<fp16>(float value) { return __float2half_rn(value); }

// The dtype is known at run time only: for modulation rows, read once per segment, and for the scalar path.
__device__ __forceinline__ float load_any(const void* data, int32_t dtype, int64_t index) {
  if (dtype == kBFloat16) return to_float(static_cast<const bf16*>(data)[index]);
  if (dtype == kFloat16) return to_float(static_cast<const fp16*>(data)[index]);
  return static_cast<const float*>(data)[index];
}

__device__ __forceinline__ void store_any(void* data, int32_t dtype, int64_t index, float value) {
  if (dtype == kBFloat16) static_cast<bf16*>(data)[index] = from_float<bf16>(value);
  else if (dtype == kFloat16) static_cast<fp16*>(data)[index] = from_float<fp16>(value);
  else static_cast<float*>(data)[index] = value;
}

// ---- eight neighbouring elements of one thread ----------------------------------------------------------------------

constexpr int kVector = 8;

__device__ __forceinline__ float2 unpack(bf16, uint32_t bits) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&bits));
}
__device__ __forceinline__ float2 unpack(fp16, uint32_t bits) {
  return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}
__device__ __forceinline__ uint32_t pack(bf16, float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}
__device__ __forceinline__ uint32_t pack(fp16, float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}

template <class T> __device__ __forceinline__ void load_vector(const T* source, float (&out)[kVector]) {
  CHECK_ALIGNED(source, 16);
  const uint4 bits = *reinterpret_cast<const uint4*>(source);
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack(T{}, words[i]);
    out[2 * i] = pair.x;
    out[2 * i + 1] = pair.y;
  }
}
template <> __device__ __forceinline__ void load_vector<float>(const float* source, float (&out)[kVector]) {
  CHECK_ALIGNED(source, 16);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float4 quad = reinterpret_cast<const float4*>(source)[i];
    out[4 * i] = quad.x, out[4 * i + 1] = quad.y, out[4 * i + 2] = quad.z, out[4 * i + 3] = quad.w;
  }
}

template <class T>
__device__ __forceinline__ void store_vector(T* target, const float (&in)[kVector], bool active) {
  if (!active) return;
  CHECK_ALIGNED(target, 16);
  uint4 bits;
  bits.x = pack(T{}, in[0], in[1]), bits.y = pack(T{}, in[2], in[3]);
  bits.z = pack(T{}, in[4], in[5]), bits.w = pack(T{}, in[6], in[7]);
  *reinterpret_cast<uint4*>(target) = bits;
}
template <>
__device__ __forceinline__ void store_vector<float>(float* target, const float (&in)[kVector], bool active) {
  if (!active) return;
  CHECK_ALIGNED(target, 16);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    reinterpret_cast<float4*>(target)[i] = float4{in[4 * i], in[4 * i + 1], in[4 * i + 2], in[4 * i + 3]};
  }
}

// ---- asynchronous copies to shared memory ---------------------------------------------------------------------------

#ifdef ADALN_EMULATE
inline void copy_async_16(void* shared, const void* global) { emulate::copy(shared, global, 16); }
inline void copy_async_4(void* shared, const void* global) { emulate::copy(shared, global, 4); }
inline void commit_copies() {}
inline void wait_copies(int) {}
#else
__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
}
__device__ __forceinline__ void copy_async_4(void* shared, const void* global) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(global) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `pending` of this thread's newest groups are still on their way.
__device__ __forceinline__ void wait_copies(int pending) {
  switch (pending) {
    case 0: asm volatile("cp.async.wait_group 0;" ::: "memory"); break;
    case 1: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
    case 2: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
    case 3: asm volatile("cp.async.wait_group 3;" ::: "memory"); break;
    case 4: asm volatile("cp.async.wait_group 4;" ::: "memory"); break;
    case 5: asm volatile("cp.async.wait_group 5;" ::: "memory"); break;
    case 6: asm volatile("cp.async.wait_group 6;" ::: "memory"); break;
    default: asm volatile("cp.async.wait_group 7;" ::: "memory"); break;
  }
}
#endif

// ---- sums over a block ----------------------------------------------------------------------------------------------

constexpr int kMaxThreads = 640;
constexpr int kMaxWarps = kMaxThreads / 32;

// Sums M values of every thread over the block, in a fixed order; every thread gets all M sums. One barrier.
//
// In each of the first log2(M) exchanges a lane gives away the half of the values that it stops summing, so M sums cost
// M - 1 + log2(32 / M) shuffles instead of 5 * M. `buffer` must be zero beyond the last warp, and may be used
// again only after another barrier.
template <int M>
__device__ __forceinline__ void block_sum(float (&values)[M], float (*buffer)[kMaxWarps], int num_warps) {
  const int lane = threadIdx.x & 31;
  int which = 0;
#pragma unroll
  for (int half = M / 2, bit = 1; half >= 1; half /= 2, bit *= 2) {
    const bool upper = lane & bit;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float given = upper ? values[i] : values[i + half];
      const float kept = upper ? values[i + half] : values[i];
      values[i] = kept + __shfl_xor_sync(kAllLanes, given, bit);
    }
    which += upper ? half : 0;
  }
#pragma unroll
  for (int bit = M; bit < 32; bit *= 2) values[0] += __shfl_xor_sync(kAllLanes, values[0], bit);
  if (lane < M) buffer[which][threadIdx.x >> 5] = values[0];
  __syncthreads();
#pragma unroll
  for (int m = 0; m < M; ++m) {
    float total = 0.0f;
#pragma unroll
    for (int quad = 0; quad < kMaxWarps / 4; ++quad) {
      if (quad * 4 < num_warps) {
        const float4 part = reinterpret_cast<const float4*>(buffer[m])[quad];
        total += (part.x + part.y) + (part.z + part.w);
      }
    }
    values[m] = total;
  }
}

}  // namespace adaln
