/* Stands before the C library (LD_PRELOAD) in the calls that change files: those that create,
 * write, sync, rename, link, delete. The n-th one fails, or ends the process.
 * fault_files.py arms it through ctypes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum { kOff, kFail, kFailFromThereOn, kKill };

static int mode = kOff;
static long countdown;
static int failure;
static char names[128]; /* of the calls meant; empty: all */
static char failed[32]; /* the call that was hit */

void faults_arm(int new_mode, long n, int code, const char *only) {
  strncpy(names, only, sizeof names - 1);
  countdown = n, failure = code, failed[0] = '\0';
  mode = new_mode;
}
const char *faults_failed(void) { return failed; }

/* Whether this call is to fail. */
static bool hit(const char *name) {
  if (mode == kOff || (names[0] != '\0' && strstr(names, name) == NULL)) return false;
  if (--countdown > 0 || (countdown < 0 && mode != kFailFromThereOn)) return false;
  if (failed[0] == '\0') strncpy(failed, name, sizeof failed - 1);
  if (mode == kKill) kill(getpid(), SIGKILL);
  errno = failure;
  return true;
}

#define CHANGES(type, name, parameters, arguments)                   \
  type name parameters {                                             \
    static type(*system) parameters;                                 \
    if (system == NULL) *(void **)&system = dlsym(RTLD_NEXT, #name); \
    return hit(#name) ? -1 : system arguments;                       \
  }

CHANGES(ssize_t, write, (int fd, const void *data, size_t bytes), (fd, data, bytes))
CHANGES(ssize_t, pwrite64, (int fd, const void *data, size_t bytes, off64_t at),
        (fd, data, bytes, at))
CHANGES(ssize_t, sendfile64, (int to, int from, off64_t *at, size_t bytes), (to, from, at, bytes))
CHANGES(ssize_t, copy_file_range,
        (int from, off64_t *a, int to, off64_t *b, size_t n, unsigned flags),
        (from, a, to, b, n, flags))
CHANGES(int, fsync, (int fd), (fd))
CHANGES(int, fdatasync, (int fd), (fd))
CHANGES(int, ftruncate64, (int fd, off64_t bytes), (fd, bytes))
CHANGES(int, fchmod, (int fd, mode_t bits), (fd, bits))
CHANGES(int, chmod, (const char *path, mode_t bits), (path, bits))
CHANGES(int, mkdir, (const char *path, mode_t bits), (path, bits))
CHANGES(int, rename, (const char *from, const char *to), (from, to))
CHANGES(int, renameat, (int a, const char *from, int b, const char *to), (a, from, b, to))
CHANGES(int, renameat2, (int a, const char *from, int b, const char *to, unsigned flags),
        (a, from, b, to, flags))
CHANGES(int, link, (const char *from, const char *to), (from, to))
CHANGES(int, unlink, (const char *path), (path))
CHANGES(int, unlinkat, (int folder, const char *path, int flags), (folder, path, flags))
CHANGES(int, rmdir, (const char *path), (path))

/* Opening counts where it creates. */
int open64(const char *path, int flags, ...) {
  static int (*system)(const char *, int, ...);
  if (system == NULL) *(void **)&system = dlsym(RTLD_NEXT, "open64");
  va_list more;
  va_start(more, flags);
  const mode_t bits = (flags & O_CREAT) != 0 ? va_arg(more, mode_t) : 0;
  va_end(more);
  if ((flags & O_CREAT) != 0 && hit("open64")) return -1;
  return system(path, flags, bits);
}
