// Just enough of CUDA to run the kernels on a CPU: every thread of a block is a fiber, blocks run one after the other.
//
// It checks the logic, not the memory model: no races are seen, and fibers are switched only where a warp or a block
// waits. Shared memory is allocated to the byte, so that AddressSanitizer sees what leaves it, and starts as NaN.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__ inline
#define __host__
#define __forceinline__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };

// ---- 16-bit floats --------------------------------------------------------------------------------------------------

struct __nv_bfloat16 { uint16_t bits; };
struct __half { _Float16 value; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
struct __half2 { __half x, y; };

inline float __bfloat162float(__nv_bfloat16 value) {
  const uint32_t bits = uint32_t(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (std::isnan(value)) return {0x7fff};
  return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};  // round to nearest, ties to even
}
inline float __half2float(__half value) { return float(value.value); }
inline __half __float2half_rn(float value) { return {_Float16(value)}; }
inline float2 __half22float2(__half2 v) { return {__half2float(v.x), __half2float(v.y)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }

using std::max;
using std::min;
inline float rsqrtf(float value) { return 1.0f / std::sqrt(value); }
inline float __uint_as_float(uint32_t bits) {
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

// ---- fibers ---------------------------------------------------------------------------------------------------------

inline thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulate {

constexpr size_t kStackBytes = 128 * 1024;

// A place where `size` fibers wait for each other.
struct Barrier {
  unsigned arrived = 0, generation = 0;
};

struct Block {
  unsigned num_threads = 0, current = 0, num_done = 0;
  ucontext_t scheduler;
  std::vector<ucontext_t> contexts;
  std::vector<bool> done, started;
  std::vector<jmp_buf> jumps;
  jmp_buf jump_back;
  std::vector<std::vector<char>> stacks;
  std::vector<Barrier> warps;
  std::vector<float> exchange;
  Barrier all;
  std::function<void()> kernel;
};
inline Block block;
inline unsigned char* dynamic_shared = nullptr;

// swapcontext asks the kernel for the signal mask each time; a jump does not, but AddressSanitizer cannot follow it.
#ifdef __SANITIZE_ADDRESS__
inline void yield() { swapcontext(&block.contexts[block.current], &block.scheduler); }
inline void resume(unsigned i) { swapcontext(&block.scheduler, &block.contexts[i]); }
#else
inline void yield() {
  if (_setjmp(block.jumps[block.current]) == 0) _longjmp(block.jump_back, 1);
}
inline void resume(unsigned i) {
  if (_setjmp(block.jump_back) != 0) return;
  if (block.started[i]) _longjmp(block.jumps[i], 1);
  block.started[i] = true;
  setcontext(&block.contexts[i]);
}
#endif

inline void wait(Barrier& barrier, unsigned size) {
  const unsigned generation = barrier.generation;
  if (++barrier.arrived == size) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
  while (barrier.generation == generation) yield();
}

inline unsigned warp_size() { return std::min(32u, block.num_threads - block.current / 32 * 32); }

inline void enter() {
  block.kernel();
  block.done[block.current] = true;
  ++block.num_done;
  yield();
  std::abort();
}

inline void run_block(unsigned num_threads, dim3 shape) {
  block.num_threads = num_threads;
  block.num_done = 0;
  block.contexts.resize(num_threads);
  block.done.assign(num_threads, false);
  block.started.assign(num_threads, false);
  if (block.jumps.size() < num_threads) block.jumps = std::vector<jmp_buf>(num_threads);
  while (block.stacks.size() < num_threads) block.stacks.emplace_back(kStackBytes);
  block.warps.assign((num_threads + 31) / 32, Barrier{});
  block.exchange.assign(num_threads, 0.0f);
  block.all = Barrier{};
  for (unsigned i = 0; i < num_threads; ++i) {
    getcontext(&block.contexts[i]);
    block.contexts[i].uc_stack.ss_sp = block.stacks[i].data();
    block.contexts[i].uc_stack.ss_size = kStackBytes;
    block.contexts[i].uc_link = nullptr;
    makecontext(&block.contexts[i], reinterpret_cast<void (*)()>(enter), 0);
  }
  while (block.num_done < num_threads) {
    for (unsigned i = 0; i < num_threads; ++i) {
      if (block.done[i]) continue;
      block.current = i;
      threadIdx = dim3(i % shape.x, i / shape.x % shape.y, i / shape.x / shape.y);
      resume(i);
    }
  }
}

template <class Kernel, class Params>
void launch(Kernel kernel, dim3 grid, dim3 shape, int shared_bytes, const Params& params) {
  gridDim = grid;
  blockDim = shape;
  void* shared = nullptr;
  if (posix_memalign(&shared, 16, std::max(shared_bytes, 16)) != 0) std::abort();
  dynamic_shared = static_cast<unsigned char*>(shared);
  block.kernel = [&] { kernel(params); };
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) {
      blockIdx = dim3(x, y);
      std::memset(shared, 0xff, shared_bytes);  // NaN in every float dtype
      run_block(shape.x * shape.y * shape.z, shape);
    }
  }
  std::free(shared);
}

inline void check_aligned(const void* pointer, uintptr_t bytes) {
  assert(reinterpret_cast<uintptr_t>(pointer) % bytes == 0 && "misaligned vector access");
}

inline void copy(void* target, const void* source, int bytes) {
  check_aligned(target, bytes);
  check_aligned(source, bytes);
  std::memcpy(target, source, bytes);
}

}  // namespace emulate

#define DYNAMIC_SHARED(name) unsigned char* name = emulate::dynamic_shared
#define LAUNCH(kernel, grid, block, shared_bytes, stream, ...) emulate::launch(kernel, grid, block, shared_bytes, __VA_ARGS__)
#define CHECK_ALIGNED(pointer, bytes) emulate::check_aligned(pointer, bytes)

inline void __syncthreads() { emulate::wait(emulate::block.all, emulate::block.num_threads); }
inline void __syncwarp() { emulate::wait(emulate::block.warps[emulate::block.current / 32], emulate::warp_size()); }
inline float __shfl_xor_sync(unsigned, float value, int bit) {
  auto& block = emulate::block;
  block.exchange[block.current] = value;
  __syncwarp();
  const float result = block.exchange[block.current ^ bit];
  __syncwarp();
  return result;
}

inline float __shfl_sync(unsigned, float value, int lane) {
  auto& block = emulate::block;
  block.exchange[block.current] = value;
  __syncwarp();
  const float result = block.exchange[block.current / 32 * 32 + lane];
  __syncwarp();
  return result;
}

// ---- the runtime ----------------------------------------------------------------------------------------------------

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaDevAttrMultiProcessorCount };
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "emulated"; }
template <class Kernel> cudaError_t cudaFuncSetAttribute(Kernel, int, int bytes) {
  return bytes <= 227 * 1024 ? cudaSuccess : cudaErrorInvalidValue;  // what a block may have on Hopper
}
inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) { *value = 3; return cudaSuccess; }
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, Kernel, int, int) {
  *count = 2;
  return cudaSuccess;
}
