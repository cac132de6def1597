#include "cpu/parallel.hpp"

#include <sched.h>

#include <algorithm>
#include <thread>

namespace nf4::cpu {
namespace {

constexpr int kMaxThreads = 256;

}  // namespace

int available_processors() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

void detail::run_pieces(int64_t count, int64_t grain, int threads, Piece piece, const void *body) {
  if (count == 0) return;
  const int64_t grains = (count + grain - 1) / grain;
  const int64_t wanted = threads > 0 ? threads : available_processors();
  const int pieces = static_cast<int>(std::min<int64_t>({wanted, grains, kMaxThreads}));
  const auto boundary = [&](int i) { return std::min(count, grains * i / pieces * grain); };

  std::thread workers[kMaxThreads];
  for (int i = 1; i < pieces; ++i) {
    try {
      workers[i] = std::thread(piece, body, boundary(i), boundary(i + 1));
    } catch (...) {
      piece(body, boundary(i), boundary(i + 1));
    }
  }
  piece(body, 0, boundary(1));
  for (int i = 1; i < pieces; ++i)
    if (workers[i].joinable()) workers[i].join();
}

}  // namespace nf4::cpu
