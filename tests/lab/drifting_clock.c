/* Another clock for a process: OFFSET_NS ahead, and gaining PPM since SINCE_NS of the monotonic one,
   which gains as well, as where a daemon steers a clock or none does. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long long number(const char *name) {
    const char *text = getenv(name);
    return text ? atoll(text) : 0;
}

int clock_gettime(clockid_t id, struct timespec *at) {
    static long long offset, since, ppm, is_read;
    struct timespec now;
    int status = (int)syscall(SYS_clock_gettime, id, at);
    if (status || (id != CLOCK_REALTIME && id != CLOCK_MONOTONIC)) return status;
    if (!is_read) {
        offset = number("DRIFTING_OFFSET_NS"), since = number("DRIFTING_SINCE_NS");
        ppm = number("DRIFTING_PPM"), is_read = 1;
    }
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
    long long shift = (now.tv_sec * 1000000000LL + now.tv_nsec - since) / 1000000 * ppm;
    if (id == CLOCK_REALTIME) shift += offset;
    long long ns = at->tv_sec * 1000000000LL + at->tv_nsec + shift;
    at->tv_sec = ns / 1000000000, at->tv_nsec = ns % 1000000000;
    return 0;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec, at->tv_usec = now.tv_nsec / 1000;
    return 0;
}
