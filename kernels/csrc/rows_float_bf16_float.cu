#include "instances.cuh"

namespace adaln {
DEFINE_TRIPLE(float, bf16, float)
}  // namespace adaln
