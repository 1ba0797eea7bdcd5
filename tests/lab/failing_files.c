/* Preloaded into every process: from the FAIL_FROM-th on, or at that one alone, operations on files
   below FAIL_UNDER fail with FAIL_ERRNO. FAIL_COUNT is a file that counts them for all processes. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int fails(const char *path) {
  const char *under = getenv("FAIL_UNDER"), *from = getenv("FAIL_FROM");
  static int *count;
  if (!under || !from || !path || strncmp(path, under, strlen(under))) return 0;
  if (!count) {
    int fd = REAL(open)(getenv("FAIL_COUNT"), O_RDWR | O_CLOEXEC);
    if (fd < 0) return 0;
    count = mmap(0, sizeof *count, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    REAL(close)(fd);
  }
  int number = __atomic_fetch_add(count, 1, __ATOMIC_SEQ_CST), first = atoi(from);
  if (getenv("FAIL_ONCE") ? number != first : number < first) return 0;
  errno = atoi(getenv("FAIL_ERRNO"));
  return 1;
}

static int fails_at(int fd) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t size = readlink(link, path, sizeof path - 1);
  if (size < 0) return 0;
  path[size] = 0;
  return fails(path);
}

#define OPENS(name)                                     \
  int name(const char *path, int flags, ...) {          \
    va_list more;                                       \
    va_start(more, flags);                              \
    mode_t mode = va_arg(more, int);                    \
    va_end(more);                                       \
    return fails(path) ? -1 : REAL(name)(path, flags, mode); \
  }
#define OPENS_AT(name)                                  \
  int name(int at, const char *path, int flags, ...) {  \
    va_list more;                                       \
    va_start(more, flags);                              \
    mode_t mode = va_arg(more, int);                    \
    va_end(more);                                       \
    return fails(path) ? -1 : REAL(name)(at, path, flags, mode); \
  }
OPENS(open) OPENS(open64) OPENS_AT(openat) OPENS_AT(openat64)

#define PATH(type, bad, name, parameters, path, arguments) \
  type name parameters { return fails(path) ? bad : REAL(name) arguments; }
#define FILE_(type, name, parameters, fd, arguments) \
  type name parameters { return fails_at(fd) ? -1 : REAL(name) arguments; }
PATH(int, -1, mkdir, (const char *path, mode_t mode), path, (path, mode))
PATH(int, -1, rename, (const char *from, const char *to), to, (from, to))
PATH(int, -1, link, (const char *from, const char *to), to, (from, to))
PATH(DIR *, NULL, opendir, (const char *path), path, (path))
PATH(int, -1, stat64, (const char *path, struct stat64 *result), path, (path, result))
PATH(int, -1, lstat64, (const char *path, struct stat64 *result), path, (path, result))
PATH(int, -1, statvfs64, (const char *path, struct statvfs64 *result), path, (path, result))
FILE_(ssize_t, write, (int fd, const void *bytes, size_t size), fd, (fd, bytes, size))
FILE_(ssize_t, read, (int fd, void *bytes, size_t size), fd, (fd, bytes, size))
FILE_(int, fsync, (int fd), fd, (fd))
FILE_(int, ftruncate64, (int fd, off64_t size), fd, (fd, size))
FILE_(ssize_t, sendfile64, (int to, int from, off64_t *at, size_t size), to, (to, from, at, size))
