// Splits a range over threads.
#pragma once

#include <cstdint>

namespace nf4::cpu {

// Calls body(begin, end) on chunks that cover [0, count) once, in any order. It uses at most
// `threads` threads (0: available_processors()), including the calling one, and no more than one
// for each `per_thread` of the range. Chunks become smaller towards the end, and a thread takes the
// next chunk when it has finished one, so a thread that starts late or is interrupted delays the
// call little.
//
// Threads are kept for the next call (workers.hpp). If the system refuses to start a thread, the
// others do its share.
template <class Body>
void parallel_for(int64_t count, int64_t per_thread, int threads, const Body &body);

// Counts the processors that the process may run on, or fewer if a quota of their time is less.
int available_processors();
// The number of threads for parallel_for(): the given number, or one for each processor.
inline int threads_of(int threads) { return threads > 0 ? threads : available_processors(); }

namespace detail {
using Chunk = void (*)(const void *body, int64_t begin, int64_t end);
void run_chunks(int64_t count, int64_t per_thread, int threads, Chunk chunk, const void *body);
}  // namespace detail

template <class Body>
void parallel_for(int64_t count, int64_t per_thread, int threads, const Body &body) {
  detail::run_chunks(
      count, per_thread, threads,
      [](const void *opaque, int64_t begin, int64_t end) {
        (*static_cast<const Body *>(opaque))(begin, end);
      },
      &body);
}

}  // namespace nf4::cpu
