// The C interface that kernels/qk_extension.py calls. Every function returns a cudaError_t.
#include "on_device.cuh"
#include "qk_norm_rope.cuh"
#include "qk_scalar.cuh"

namespace adaln {
namespace {

template <class Kernel> int launch(Kernel kernel, int bytes, const QkParams& p, cudaStream_t stream, int* fits) {
  const int num_threads = (columns_of(p) / p.vectors / kVector + 31) / 32 * 32;
  bytes *= num_threads;
  // Also for 48 KB and less: with the static part it may be more.
  if (const int error = allow_shared_memory(kernel, bytes)) return error;
  if (fits != nullptr) return cudaOccupancyMaxActiveBlocksPerMultiprocessor(fits, kernel, num_threads, bytes);
  LAUNCH(kernel, dim3(p.sides[0].num_blocks + p.sides[1].num_blocks), dim3(num_threads), bytes, stream, p);
  return cudaGetLastError();
}

template <class T, bool kPerHead, bool kBackward, int V, int R>
int launch(const QkParams& p, cudaStream_t stream, int* fits) {
  const int bytes_per_thread = QkWalk<T, kPerHead, kBackward, V, R>::Rows::bytes(1);
  if constexpr (kBackward) return launch(qk_backward_kernel<T, kPerHead, V, R>, bytes_per_thread, p, stream, fits);
  else return launch(qk_forward_kernel<T, kPerHead, V, R>, bytes_per_thread, p, stream, fits);
}

// The vectors a thread and rows between barriers that `choose_layout` in kernels/qk_extension.py chooses from.
template <class T, bool kPerHead> int launch_rows(const QkParams& p, bool is_backward, cudaStream_t stream, int* fits) {
  const auto is_layout = [&](int vectors, int rows) { return p.vectors == vectors && p.rows == rows; };
  if (!is_backward && is_layout(1, 2)) return launch<T, kPerHead, false, 1, 2>(p, stream, fits);
  if (!is_backward && is_layout(2, 2)) return launch<T, kPerHead, false, 2, 2>(p, stream, fits);
  if (is_backward && is_layout(1, 2)) return launch<T, kPerHead, true, 1, 2>(p, stream, fits);
  if (is_backward && is_layout(2, 1)) return launch<T, kPerHead, true, 2, 1>(p, stream, fits);
  return cudaErrorInvalidConfiguration;
}

template <class T> int launch_rows(const QkParams& p, bool is_backward, cudaStream_t stream, int* fits) {
  return p.width == columns_of(p) ? launch_rows<T, false>(p, is_backward, stream, fits)
                                  : launch_rows<T, true>(p, is_backward, stream, fits);
}

int launch_rows(const QkParams& p, bool is_backward, cudaStream_t stream, int* fits) {
  if (p.dtype == kBFloat16) return launch_rows<bf16>(p, is_backward, stream, fits);
  if (p.dtype == kFloat16) return launch_rows<fp16>(p, is_backward, stream, fits);
  return launch_rows<float>(p, is_backward, stream, fits);
}

int tiles(int size, int tile) { return (size + tile - 1) / tile; }

}  // namespace
}  // namespace adaln

using adaln::QkParams;

extern "C" {

int qk_params_bytes() { return sizeof(QkParams); }

// How many blocks of the fast kernel fit on a multiprocessor; kNoInstance if a row is too wide for one.
int qk_blocks_per_multiprocessor(const QkParams* p, int is_backward, int* count) {
  const adaln::OnDevice guard(p->device);
  return guard.error() ? guard.error() : adaln::launch_rows(*p, is_backward, nullptr, count);
}

int qk_rows(const QkParams* p, int is_backward, cudaStream_t stream) {
  const adaln::OnDevice guard(p->device);
  return guard.error() ? guard.error() : adaln::launch_rows(*p, is_backward, stream, nullptr);
}

int qk_scalar_rows(const QkParams* p, int is_backward, cudaStream_t stream) {
  const adaln::OnDevice guard(p->device);
  if (guard.error()) return guard.error();
  const int num_blocks = p->sides[0].num_blocks + p->sides[1].num_blocks;
  const dim3 grid(num_blocks, 2), block(adaln::kQkScalarThreads);
  if (!is_backward) {
    LAUNCH(adaln::qk_scalar_kernel<false>, grid, block, 0, stream, *p);
    return cudaGetLastError();
  }
  LAUNCH(adaln::qk_scalar_kernel<true>, grid, block, 0, stream, *p);
  if (p->sides[0].partials != nullptr) {
    const dim3 columns(adaln::tiles(p->width, adaln::kQkColumnThreads), num_blocks);
    LAUNCH(adaln::qk_column_kernel, columns, dim3(adaln::kQkColumnThreads), 0, stream, *p);
  }
  return cudaGetLastError();
}

int qk_finish(const QkParams* p, cudaStream_t stream) {
  const adaln::OnDevice guard(p->device);
  if (guard.error()) return guard.error();
  const dim3 grid(adaln::tiles(p->width, adaln::kQkFinishSide), 2), block(adaln::kQkFinishSide, adaln::kQkFinishSide);
  LAUNCH(adaln::qk_finish_kernel, grid, block, 0, stream, *p);
  return cudaGetLastError();
}

}  // extern "C"
