// What the library remembers of GPUs lasts as long as the process: a child, for checks that begin
// with none of it.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <string>

namespace nf4::test::standin {

template <class Body>
std::string said_by(const Body &body) {
  try {
    return body();
  } catch (...) {  // a failed REQUIRE, which is of the parent's test
    _exit(1);
  }
}

// The result of body() in a child. A child that dies says so instead.
template <class Body>
std::string in_child(const Body &body) {
  int pipe_ends[2];
  if (pipe(pipe_ends) != 0) return "no pipe";
  const pid_t child = fork();
  if (child == 0) {
    // Of Catch2, which would report on a test of the parent.
    for (const int fatal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) std::signal(fatal, SIG_DFL);
    const std::string said = said_by(body);
    for (size_t at = 0; at < said.size();) {
      const ssize_t wrote = write(pipe_ends[1], said.data() + at, said.size() - at);
      if (wrote < 0) _exit(1);
      at += static_cast<size_t>(wrote);
    }
    _exit(0);
  }
  close(pipe_ends[1]);
  std::string heard;
  char buffer[4096];
  for (ssize_t got; (got = read(pipe_ends[0], buffer, sizeof buffer)) > 0;)
    heard.append(buffer, static_cast<size_t>(got));
  close(pipe_ends[0]);
  int status = -1;
  waitpid(child, &status, 0);
  return status == 0 ? heard : heard + "a child ended with status " + std::to_string(status) + "\n";
}

}  // namespace nf4::test::standin
