#include "instances.cuh"

namespace adaln {
DEFINE_TRIPLE(float, float, float)
}  // namespace adaln
