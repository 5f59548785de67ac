#include "instances.cuh"

namespace adaln {
DEFINE_TRIPLE(fp16, fp16, fp16)
}  // namespace adaln
