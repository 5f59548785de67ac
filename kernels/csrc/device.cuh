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

// A bf16 is the upper half of a float: one instruction each.
__device__ __forceinline__ float2 unpack(bf16, uint32_t bits) {
  return float2{__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
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

// Lets a kernel have `bytes` of dynamic shared memory; kNoInstance if the GPU has not so much for a block.
constexpr int kNoInstance = -1;
template <class Kernel> int allow_shared_memory(Kernel kernel, int bytes) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaErrorInvalidValue) return error;
  cudaGetLastError();  // it is forgotten
  return kNoInstance;
}

// ---- asynchronous copies to shared memory ---------------------------------------------------------------------------

#ifdef ADALN_EMULATE
inline void copy_async_16(void* shared, const void* global) { emulate::copy(shared, global, 16); }
inline void copy_async_4(void* shared, const void* global) { emulate::copy(shared, global, 4); }
inline void commit_copies() {}
template <int pending> inline void wait_copies() {}
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
template <int pending> __device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}
#endif

// ---- sums over a block ----------------------------------------------------------------------------------------------

constexpr int kMaxThreads = 512;
constexpr int kMaxWarps = kMaxThreads / 32;

// Empties a buffer of block_sum, for the warps that the block does not have.
template <int size> __device__ __forceinline__ void clear(float (&sums)[size]) {
  for (int i = threadIdx.x; i < size; i += blockDim.x) sums[i] = 0.0f;
  __syncthreads();
}

// Sums M values (1, 2 or 4) of every thread over the block, in a fixed order; every thread gets all M. One barrier.
//
// In each of the first log2(M) exchanges a lane gives away the half of the values that it stops summing, so M sums cost
// M - 1 + log2(32 / M) shuffles instead of 5 * M. `buffer` has M * kMaxWarps entries, must be zero beyond the last warp's,
// and may be used again only after another barrier.
template <int M> __device__ __forceinline__ void block_sum(float (&values)[M], float* buffer) {
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
  if (lane < M) buffer[(threadIdx.x >> 5) * M + which] = values[0];
  __syncthreads();
  // Entry i is of value i % M, whatever the warp.
  float total = buffer[lane % (M * kMaxWarps)];
  if constexpr (M == 4) total += buffer[lane + 32];
#pragma unroll
  for (int bit = M; bit < 32 && bit < M * kMaxWarps; bit *= 2) total += __shfl_xor_sync(kAllLanes, total, bit);
#pragma unroll
  for (int m = 0; m < M; ++m) values[m] = M == 1 ? total : __shfl_sync(kAllLanes, total, m);
}

}  // namespace adaln
