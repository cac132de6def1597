// A host weight with each part between guard pages.
#pragma once

#include <array>
#include <vector>

#include "support/cases.hpp"
#include "support/guarded.hpp"

namespace nf4::test {

// A buffer against a random edge, misaligned as far as `alignment` allows.
GuardedBuffer random_buffer(Rng &rng, size_t bytes, int alignment);

class PlacedWeight {
 public:
  PlacedWeight(Rng &rng, const HostWeight &weight);

  const nf4_tensor &tensor() const { return tensor_; }
  const uint8_t *data(Part part) const;
  // Makes the parts what they were at first: the contents of the host weight.
  void reset();
  bool surroundings_intact() const;
  // Are the bytes of `part` those of the host weight?
  bool unchanged(Part part) const;

 private:
  const HostWeight &weight_;
  std::vector<GuardedBuffer> buffers_;
  std::array<int, kPartCount> buffer_of_{};
  nf4_tensor tensor_{};
};

}  // namespace nf4::test
