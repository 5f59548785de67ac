#include "instances.cuh"

namespace adaln {
DEFINE_TRIPLE(float, bf16, bf16)
}  // namespace adaln
