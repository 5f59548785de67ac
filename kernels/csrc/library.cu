// The C interface that kernels/extension.py calls. Every function returns a cudaError_t, or kNoInstance.
#include "finish.cuh"
#include "instances.cuh"
#include "on_device.cuh"
#include "scalar.cuh"

namespace adaln {
namespace {

bool fits(const Params& p, int32_t x, int32_t y, int32_t h) {
  // A backward without a gate reads no y but may write dy, which has its dtype.
  const bool reads_y = p.y.data != nullptr, writes_dy = p.dy.data != nullptr;
  return p.x.dtype == x && p.h.dtype == h && (!reads_y || p.y.dtype == y) && (!writes_dy || p.dy.dtype == y);
}

int launch_fast_rows(const Params& p, bool is_backward, cudaStream_t stream, int* blocks_per_sm) {
#define TRY_TRIPLE(X, Y, H) \
  if (fits(p, kDtypeOf<X>, kDtypeOf<Y>, kDtypeOf<H>)) return rows_##X##_##Y##_##H(p, is_backward, stream, blocks_per_sm);
  FOR_EACH_TRIPLE(TRY_TRIPLE)
#undef TRY_TRIPLE
  return kNoInstance;
}

int launch_any_columns(const Params& p, cudaStream_t stream) {
#define TRY_TRIPLE(X, Y, H) \
  if (fits(p, kDtypeOf<X>, kDtypeOf<Y>, kDtypeOf<H>)) return columns_##X##_##Y##_##H(p, stream);
  FOR_EACH_TRIPLE(TRY_TRIPLE)
#undef TRY_TRIPLE
  return launch_columns<Any, Any, Any>(p, stream);
}

}  // namespace
}  // namespace adaln

using adaln::Params;

extern "C" {

int adaln_params_bytes() { return sizeof(Params); }

const char* adaln_error(int code) {
  return code == adaln::kNoInstance ? "no kernel for these dtypes" : cudaGetErrorString(static_cast<cudaError_t>(code));
}

int adaln_num_multiprocessors(int device, int* count) {
  return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}

// How many blocks of the fast kernel a multiprocessor should have; 0 if none fits.
int adaln_blocks_per_multiprocessor(const Params* p, int is_backward, int* count) {
  const adaln::OnDevice guard(p->device);
  return guard.error() ? guard.error() : adaln::launch_fast_rows(*p, is_backward, nullptr, count);
}

int adaln_rows(const Params* p, int is_backward, cudaStream_t stream) {
  const adaln::OnDevice guard(p->device);
  return guard.error() ? guard.error() : adaln::launch_fast_rows(*p, is_backward, stream, nullptr);
}

int adaln_scalar_rows(const Params* p, int is_backward, cudaStream_t stream) {
  const adaln::OnDevice guard(p->device);
  if (guard.error()) return guard.error();
  const dim3 grid(p->num_blocks), block(adaln::kScalarThreads);
  if (is_backward) LAUNCH(adaln::scalar_backward_kernel, grid, block, 0, stream, *p);
  else LAUNCH(adaln::scalar_forward_kernel, grid, block, 0, stream, *p);
  return cudaGetLastError();
}

int adaln_columns(const Params* p, cudaStream_t stream) {
  const adaln::OnDevice guard(p->device);
  return guard.error() ? guard.error() : adaln::launch_any_columns(*p, stream);
}

int adaln_finish(const Params* p, cudaStream_t stream) {
  const adaln::OnDevice guard(p->device);
  if (guard.error()) return guard.error();
  const int num_crossing = p->num_segments < p->num_blocks ? p->num_segments : p->num_blocks;
  const dim3 block(adaln::kFinishSide, adaln::kFinishSide);
  const dim3 grid((p->hidden_size + adaln::kFinishSide - 1) / adaln::kFinishSide,
                  num_crossing + (p->affine_partials != nullptr ? 1 : 0));
  if (p->gate.data != nullptr) LAUNCH(adaln::finish_kernel<3>, grid, block, 0, stream, *p);
  else LAUNCH(adaln::finish_kernel<2>, grid, block, 0, stream, *p);
  return cudaGetLastError();
}

}  // extern "C"
