// Scratch memory that a thread keeps between calls, so that a step does not fault in fresh pages.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <cstdlib>

namespace kvforge {

class Workspace {
 public:
  Workspace() = default;
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace() { std::free(data_); }

  // At least `bytes` bytes, aligned to 64; contents are undefined, earlier pointers become invalid.
  char* get(int64_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = 0;
      const int64_t rounded = (bytes + 4095) / 4096 * 4096;
      data_ = static_cast<char*>(std::aligned_alloc(64, rounded));
      TORCH_CHECK(data_ != nullptr, "out of memory: ", rounded, " bytes of scratch");
      size_ = rounded;
    }
    return data_;
  }

 private:
  char* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace kvforge
