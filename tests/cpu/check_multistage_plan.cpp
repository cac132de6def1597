// How the multistage kernels divide a product among CTAs: every K-tile of every tile is multiplied
// once, no CTA waits for one after it, partial sums have a place in the workspace and are added in
// the order of K. The CTAs run here one after the other, by the code that the kernels run.
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/matmul/multistage/limit.hpp"
#include "cuda/matmul/multistage/plan.hpp"
#include "cuda/matmul/multistage/tile.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

// An L4, an A10, an RTX 3090, an RTX 5080, an A100, an RTX 4090, an L40S, an RTX 5090 and an RTX
// PRO 6000; an H200, on which tests force the kernels; and the least, and some around the most CTAs
// that the workspace has room for.
constexpr int kMultiprocessors[] = {58,  72,  82, 84, 108, 128, 142, 170,
                                    188, 132, 1,  20, 191, 192, 193, 256};

cuda::MatmulSize size_of(int64_t m, int64_t rows, int64_t cols,
                         cuda::WeightKind kind = cuda::WeightKind::kCodebook) {
  return {NF4_DTYPE_BF16, m, rows, cols, 64, kind};
}

cuda::MultistagePlan plan_of(const cuda::MatmulSize &size, int config, int multiprocessors,
                             bool split_k = true) {
  return cuda::plan_multistage(size, config, multiprocessors, split_k, cuda::MatmulWorkspace(size));
}

// A kernel reads these from blockIdx and gridDim.
struct Cta {
  int number, count;
  int cta() const { return number; }
  int ctas() const { return count; }
};

// The CTAs of a plan, run in the order in which they start.
class Run {
 public:
  Run(const cuda::MultistagePlan &plan, int64_t n_tiles, int64_t m_tiles, int64_t k_tiles)
      : plan_(plan),
        m_tiles_(m_tiles),
        k_tiles_(k_tiles),
        stored_(static_cast<size_t>(n_tiles * m_tiles)),
        slots_(static_cast<size_t>(plan.ctas)) {}

  // Returns what is wrong, or "".
  const char *wrong() {
    const auto ctas = static_cast<int>(plan_.ctas);
    for (int cta = 0; cta < ctas; ++cta) {
      waited_ = false;
      cuda::StreamKTiles<Cta> tiles(plan_.schedule, {cta, ctas});
      for (; tiles.is_valid(); tiles.advance())
        if (const char *const found = wrong_in(tiles.part(), cta)) return found;
    }
    for (const bool stored : stored_)
      if (!stored) return "a tile is not stored";
    for (const Slot &slot : slots_)
      if (slot.full) return "partial sums that nothing adds";
    return "";
  }

 private:
  struct Slot {
    bool full = false;
    int64_t tile;
    int k_tile;
    int k_tile_end;
  };

  const char *wrong_in(const cuda::TilePart &part, int cta) {
    const int64_t tile = int64_t{part.n_tile} * m_tiles_ + part.m_tile;
    if (part.n_tile < 0 || part.m_tile < 0 || part.m_tile >= m_tiles_ ||
        tile >= static_cast<int64_t>(stored_.size()))
      return "a tile that there is not";
    if (part.k_tile < 0 || part.k_tile >= part.k_tile_end || part.k_tile_end > k_tiles_)
      return "K-tiles that there are not";
    if (!part.stores_y) {
      if (waited_) return "a CTA waits before its own sums are stored";
      if (slots_[cta].full) return "a CTA stores two partial sums";
      slots_[cta] = {true, tile, part.k_tile, part.k_tile_end};
      return nullptr;
    }
    if (stored_[tile]) return "a tile is stored twice";
    stored_[tile] = true;
    if (part.first_peer < 0 || part.first_peer > cta) return "a CTA waits for a later one";
    int k_tile = 0;
    for (int peer = part.first_peer; peer < cta; ++peer) {
      Slot &slot = slots_[peer];
      waited_ = true;
      if (!slot.full || slot.tile != tile) return "a CTA waits for sums that no one stores";
      if (slot.k_tile != k_tile) return "partial sums out of the order of K";
      k_tile = slot.k_tile_end;
      slot.full = false;
    }
    if (part.k_tile != k_tile || part.k_tile_end != k_tiles_) return "K-tiles missing or twice";
    return nullptr;
  }

  const cuda::MultistagePlan &plan_;
  int64_t m_tiles_, k_tiles_;
  std::vector<bool> stored_;  // by tile
  std::vector<Slot> slots_;   // by CTA
  bool waited_ = false;       // the CTA that runs
};

void check_plan(const cuda::MatmulSize &size, int config, int multiprocessors, bool split_k) {
  INFO(cuda::kMatmulConfigs[config].name << ", m " << size.m << ", " << size.rows << " x "
                                         << size.cols << ", " << multiprocessors
                                         << " multiprocessors, split-K " << split_k);
  const cuda::MatmulConfig &tile = cuda::kMatmulConfigs[config];
  const cuda::MatmulWorkspace workspace(size);
  const cuda::MultistagePlan plan = plan_of(size, config, multiprocessors, split_k);
  REQUIRE(plan.ctas >= 1);
  REQUIRE(plan.ctas <= multiprocessors);
  if (plan.schedule.shared_tiles > 0) {
    REQUIRE(plan.ctas <= cuda::MatmulWorkspace::kMaxMultistageCtas);
    REQUIRE(plan.ctas <= workspace.ctas);
    REQUIRE(plan.ctas * tile.tile_m * tile.tile_n * 4 <= workspace.sums_bytes);
  }
  if (plan.schedule.tile_ctas > 0) {
    REQUIRE(split_k);
    REQUIRE(plan.schedule.tile_ctas <= cuda::kMaxTileCtas);
    REQUIRE(plan.ctas == int64_t{plan.schedule.shared_tiles} * plan.schedule.tile_ctas);
    REQUIRE(plan.schedule.shared_tiles == plan.schedule.tiles);
  }
  if (size.m <= 8 && size.kind == cuda::WeightKind::kCodebook) {
    REQUIRE(workspace.bytes() == 0);
    REQUIRE(plan.schedule.shared_tiles == 0);
  }
  Run run(plan, ceil_divide(size.rows, tile.tile_n), ceil_divide(size.m, tile.tile_m),
          size.cols / cuda::kMultistageTileK);
  REQUIRE(run.wrong() == std::string());
}

}  // namespace

TEST_CASE("multistage CTAs multiply each K-tile once", "[matmul]") {
  constexpr int64_t kRows[] = {1, 256, 257, 1024, 4096, 11008, 14336, 28672};
  constexpr int64_t kCols[] = {64, 128, 512, 4096, 14336};
  constexpr int64_t kMs[] = {1, 8, 9, 16, 17, 64, 65, 128, 129, 300, 1100};
  for (const int multiprocessors : kMultiprocessors)
    for (const int64_t rows : kRows)
      for (const int64_t cols : kCols)
        for (const int64_t m : kMs)
          for (const bool split_k : {false, true})
            check_plan(size_of(m, rows, cols), cuda::multistage_config(m), multiprocessors,
                       split_k);
}

TEST_CASE("multistage CTAs multiply each K-tile of random products once", "[matmul]") {
  for (int i = 0; i < cases_of(40000); ++i) {
    Rng rng(0x3a6e0000 + i);
    const int64_t m = rng.between(1, rng.one_in(2) ? 40 : rng.one_in(4) ? 5000 : 600);
    const int64_t rows = rng.between(1, rng.one_in(2) ? 3000 : 60000);
    const int64_t cols = 64 * rng.between(1, rng.one_in(2) ? 20 : 500);
    // A test may force a tile of another width than the workspace is for.
    const int config =
        rng.one_in(4) ? cuda::kFirstMultistage + static_cast<int>(rng.below(cuda::kMultistageCount))
                      : cuda::multistage_config(m);
    const cuda::WeightKind kind = rng.pick(
        {cuda::WeightKind::kCodebook, cuda::WeightKind::kInt4, cuda::WeightKind::kTransposed});
    check_plan(size_of(m, rows, cols, kind), config, rng.pick(kMultiprocessors), rng.one_in(2));
  }
}

TEST_CASE("multistage CTAs share the tiles that do not fill a wave", "[matmul]") {
  const auto check = [](int64_t m, int64_t rows, int64_t cols, int multiprocessors, int64_t ctas,
                        int shared_tiles, int tile_ctas) {
    const cuda::MultistagePlan plan =
        plan_of(size_of(m, rows, cols), cuda::multistage_config(m), multiprocessors);
    INFO("m " << m << ", " << rows << " x " << cols << ", " << multiprocessors);
    CHECK(plan.ctas == ctas);
    CHECK(plan.schedule.shared_tiles == shared_tiles);
    CHECK(plan.schedule.tile_ctas == tile_ctas);
  };
  check(8, 4096, 4096, 108, 16, 0, 0);            // there is no workspace
  check(16, 4096, 4096, 108, 96, 16, 6);          // 16 tiles of 64 K-tiles
  check(16, 4096, 512, 108, 16, 0, 0);            // 8 K-tiles are too few to share
  check(16, 4096, 1024, 108, 32, 16, 2);          // two CTAs a tile
  check(16, 14336, 4096, 132, 132, 56, 0);        // two CTAs a tile would be too few
  check(1024, 4096, 4096, 132, 128, 0, 0);        // one wave, which is nearly full
  check(128, 108 * 256, 4096, 108, 108, 0, 0);    // one wave
  check(128, 109 * 256, 4096, 108, 108, 109, 0);  // two waves, of which one is nearly empty
  check(128, 300 * 256, 4096, 108, 108, 192, 0);  // three; one of whole tiles
  check(128, 4096, 4096, 256, 128, 16, 8);        // 8 K-tiles each
  check(128, 4096, 16384, 256, 192, 16, 12);      // more multiprocessors than have room
  check(128, 200 * 256, 4096, 256, 200, 0, 0);    // more tiles than CTAs that have room
}

TEST_CASE("multistage CTAs with parts of two tiles have fewer K-tiles", "[matmul]") {
  const cuda::MultistagePlan plan = plan_of(size_of(16, 14336, 4096), cuda::kFirstMultistage, 132);
  for (int cta = 0; cta < 132; ++cta) {
    int k_tiles = 0, parts = 0;
    for (cuda::StreamKTiles<Cta> tiles(plan.schedule, {cta, 132}); tiles.is_valid();
         tiles.advance(), ++parts)
      k_tiles += tiles.part().k_tile_end - tiles.part().k_tile;
    INFO(cta);
    CHECK(parts <= 2);
    CHECK(k_tiles >= 26);
    CHECK(k_tiles <= (parts == 2 ? 26 : 28));
  }
}

TEST_CASE("smaller weights go the dense way from fewer rows of x on", "[matmul]") {
  struct Row {
    cuda::MultistageLimit limit;
    int64_t at_2_25, at_2_24, at_2_23, below;
  };
  for (const Row &row : {
           Row{{80, false, false, false}, 128, 64, 32, 0},
           Row{{89, false, false, true}, 128, 64, 0, 0},
           Row{{86, false, true, false}, 128, 64, 0, 0},
           Row{{80, false, true, true}, 64, 32, 0, 0},
           Row{{120, false, false, false}, 128, 64, 32, 0},
           Row{{100, false, false, false}, 16, 16, 16, 0},
           Row{{110, false, true, false}, 16, 16, 0, 0},
           Row{{75, true, false, false}, 64, 32, 0, 0},
           Row{{75, true, false, true}, 0, 0, 0, 0},
       }) {
    INFO("compute capability " << row.limit.compute_capability << ", gradient "
                               << row.limit.gradient << ", adapter " << row.limit.adapter);
    CHECK(row.limit.rows(int64_t{1} << 25) == row.at_2_25);
    CHECK(row.limit.rows((int64_t{1} << 25) - 1) == row.at_2_24);
    CHECK(row.limit.rows(int64_t{1} << 24) == row.at_2_24);
    CHECK(row.limit.rows(int64_t{1} << 23) == row.at_2_23);
    CHECK(row.limit.rows((int64_t{1} << 23) - 1) == row.below);
    CHECK(row.limit.rows(int64_t{1} << 60) <= 128);
  }
}
