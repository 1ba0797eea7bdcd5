/* A libnvidia-ml.so.1 of one GPU under load, as an H100 gave it; with FAKE_NVML=hangs its sample
   never ends, with FAKE_NVML=denied it cannot be initialised. */

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, NO_PERMISSION = 4, NOT_FOUND = 6 };

static int is(const char *what) {
    const char *mode = getenv("FAKE_NVML");
    return mode && !strcmp(mode, what);
}

int nvmlInit_v2(void) { return is("denied") ? NO_PERMISSION : SUCCESS; }

const char *nvmlErrorString(int status) {
    return status == NO_PERMISSION ? "Insufficient Permissions" : "Not Found";
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    *device = (void *)0x5000000001;
    return strcmp(uuid, "GPU-5d8f") ? NOT_FOUND : SUCCESS;
}

static int is_ours(void *device) { return device == (void *)0x5000000001; }

static int give(void *device, unsigned *value, unsigned number) {
    *value = number;
    return is_ours(device) ? SUCCESS : NOT_FOUND;
}

static int text(void *device, char *into, unsigned size, const char *content) {
    strncpy(into, content, size);
    return is_ours(device) ? SUCCESS : NOT_FOUND;
}

int nvmlDeviceGetUUID(void *device, char *into, unsigned size) {
    return text(device, into, size, "GPU-5d8f");
}

int nvmlDeviceGetName(void *device, char *into, unsigned size) {
    return text(device, into, size, "a GPU");
}

int nvmlDeviceGetMaxClockInfo(void *device, int kind, unsigned *mhz) {
    return give(device, mhz, 1980);
}

int nvmlDeviceGetClockInfo(void *device, int kind, unsigned *mhz) {
    while (is("hangs"))
        pause();
    return give(device, mhz, kind == 1 ? 1350 : 2619);
}

int nvmlDeviceGetPowerUsage(void *device, unsigned *mw) { return give(device, mw, 697064); }

/* a function that fails, and one that gives what cannot be; all others are missing */
int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned *mw) { return NO_PERMISSION; }

int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius) {
    return give(device, celsius, 4294967295u);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *reasons) {
    *reasons = 4;
    return is_ours(device) ? SUCCESS : NOT_FOUND;
}
