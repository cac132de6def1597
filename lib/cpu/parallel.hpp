// Splits a range over threads.
#pragma once

#include <cstdint>

namespace nf4::cpu {

// Calls body(begin, end) on pieces that cover [0, count), each starting at a multiple
// of `grain`, on at most `threads` threads (0: one for each processor the process may
// run on), the calling one included. Threads are made for the call: there is no pool to
// outlive a fork, and a few tens of microseconds are small beside the work that is worth
// splitting. Where the system refuses a thread, the caller does that piece itself.
template <class Body>
void parallel_for(int64_t count, int64_t grain, int threads, const Body &body);

int available_processors();

namespace detail {
using Piece = void (*)(const void *body, int64_t begin, int64_t end);
void run_pieces(int64_t count, int64_t grain, int threads, Piece piece, const void *body);
}  // namespace detail

template <class Body>
void parallel_for(int64_t count, int64_t grain, int threads, const Body &body) {
  detail::run_pieces(
      count, grain, threads,
      [](const void *opaque, int64_t begin, int64_t end) {
        (*static_cast<const Body *>(opaque))(begin, end);
      },
      &body);
}

}  // namespace nf4::cpu
