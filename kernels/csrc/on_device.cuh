// For the C interface.
#pragma once

#include "device.cuh"

namespace adaln {

// Makes the device of the tensors current for one launch.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    error_ = cudaGetDevice(&before_);
    if (error_ == cudaSuccess && before_ != device) {
      error_ = cudaSetDevice(device);
      moved_ = true;
    }
  }
  ~OnDevice() {
    if (moved_) cudaSetDevice(before_);
  }
  int error() const { return error_; }

 private:
  int before_ = 0;
  bool moved_ = false;
  cudaError_t error_;
};

}  // namespace adaln
