// Where dequantized elements go: to their place, or by way of a small buffer past the caches.
#pragma once

#include <cstdint>

#include "cpu/dequant/kernels.hpp"

namespace nf4::cpu {

class DequantOutput {
 public:
  // Of output, dequantized at once: straight to its place, and by way of the buffer.
  static constexpr int64_t kChunkBytes = 16384;
  static constexpr int64_t kStagedBytes = 4096;

  // `bytes` of output in all.
  DequantOutput(const DequantKernels &kernels, void *out, int64_t bytes)
      : kernels_(kernels), out_(static_cast<char *>(out)), bytes_(bytes) {}

  // Decides for a part of it.
  void begin(int64_t first, int64_t last);
  int64_t chunk_bytes() const { return nontemporal_ ? kStagedBytes : kChunkBytes; }
  // Where to make what belongs at `offset`, whole steps of at most chunk_bytes().
  char *place(int64_t offset) { return nontemporal_ ? stage_ : out_ + offset; }
  // Where to make what is no whole steps, at most kStagedBytes.
  char *stage() { return stage_; }
  // Brings what has been made there to its place.
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
