#include "instances.cuh"

namespace adaln {
DEFINE_TRIPLE(bf16, bf16, bf16)
}  // namespace adaln
