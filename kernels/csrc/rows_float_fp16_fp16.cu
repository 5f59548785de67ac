#include "instances.cuh"

namespace adaln {
DEFINE_TRIPLE(float, fp16, fp16)
}  // namespace adaln
