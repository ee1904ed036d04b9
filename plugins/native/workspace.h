// Scratch memory that a thread keeps between calls, so that a step does not fault in fresh pages.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <cstdlib>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace kvforge {

class Workspace {
 public:
  Workspace() = default;
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace() { std::free(data_); }

  // At least `bytes` bytes, aligned to a page; contents are undefined, earlier pointers become invalid.
  char* get(int64_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = 0;
      const int64_t page = bytes < kHugePage / 2 ? kPage : kHugePage, rounded = (bytes + page - 1) / page * page;
      data_ = static_cast<char*>(std::aligned_alloc(page, rounded));
      TORCH_CHECK(data_ != nullptr, "out of memory: ", rounded, " bytes of scratch");
#if defined(MADV_HUGEPAGE)
      if (page == kHugePage) madvise(data_, rounded, MADV_HUGEPAGE);  // fewer translations; a hint only
#endif
      size_ = rounded;
    }
    return data_;
  }

 private:
  static constexpr int64_t kPage = 4096, kHugePage = 2 << 20;
  char* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace kvforge
