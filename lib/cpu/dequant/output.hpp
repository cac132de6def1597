// Decides where dequantized elements are written: directly to their place, or through a small
// buffer with stores that bypass the caches.
#pragma once

#include <cstdint>

#include "cpu/dequant/kernels.hpp"

namespace nf4::cpu {

class DequantOutput {
 public:
  // The output dequantized in one part: directly, and through the buffer.
  static constexpr int64_t kChunkBytes = 16384;
  static constexpr int64_t kStagedBytes = 4096;

  // `bytes` is the size of the whole output.
  DequantOutput(const DequantKernels &kernels, void *out, int64_t bytes)
      : kernels_(kernels), out_(static_cast<char *>(out)), bytes_(bytes) {}

  // Decides how a part of the output is written.
  void begin(int64_t first, int64_t last);
  int64_t chunk_bytes() const { return nontemporal_ ? kStagedBytes : kChunkBytes; }
  // Returns where to produce whole steps, at most chunk_bytes(), that belong at `offset`.
  char *place(int64_t offset) { return nontemporal_ ? stage_ : out_ + offset; }
  // Returns where to produce elements that are not whole steps, at most kStagedBytes.
  char *stage() { return stage_; }
  // Moves elements that were produced there to their place.
  void store(const char *made, int64_t offset, int64_t bytes) const;
  void end() const;

 private:
  static constexpr int64_t kLineBytes = 64;

  const DequantKernels &kernels_;
  char *const out_;
  const int64_t bytes_;
  bool nontemporal_ = false;
  alignas(kLineBytes) char stage_[kStagedBytes];
};

}  // namespace nf4::cpu
