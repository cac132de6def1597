// A host weight with each part between guard pages.
#pragma once

#include <array>
#include <vector>

#include "support/cases.hpp"
#include "support/guarded.hpp"
#include "support/int4_cases.hpp"

namespace nf4::test {

// A buffer against a random edge, misaligned as far as `alignment` allows.
GuardedBuffer random_buffer(Rng &rng, size_t bytes, int alignment);

// Host is a HostWeight or a HostInt4Weight.
template <class Host>
class PlacedWeightOf {
 public:
  PlacedWeightOf(Rng &rng, const Host &weight);

  const typename Host::Tensor &tensor() const { return tensor_; }
  const uint8_t *data(int part) const { return buffers_[buffer_of_[part]].data(); }
  // Restores the parts to the contents of the host weight.
  void reset();
  bool surroundings_intact() const;
  // Tells whether the bytes of `part` are those of the host weight.
  bool unchanged(int part) const;

 private:
  const Host &weight_;
  std::vector<GuardedBuffer> buffers_;
  std::array<int, Host::kParts> buffer_of_{};
  typename Host::Tensor tensor_{};
};
using PlacedWeight = PlacedWeightOf<HostWeight>;
using PlacedInt4Weight = PlacedWeightOf<HostInt4Weight>;

}  // namespace nf4::test
