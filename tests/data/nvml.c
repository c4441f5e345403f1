/* A libnvidia-ml.so.1 for the tests: 8 cards, number 5 sick. What computes on them stands in `processes` beside the library,
 * a line each: card pid mebibytes. A file `hang` there makes every look at a card hang; `lost` makes card 6 fall off the bus. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, IS_LOST = 15 };
enum { CARDS = 8, SICK = 5, LOST = 6 };
typedef unsigned long long u64;
typedef struct { u64 total, free, used; } memory_t;
typedef struct { unsigned version; u64 total, reserved, free, used; } memory_v2_t;
typedef struct { unsigned gpu, memory; } rates_t;
typedef struct { unsigned pid; u64 used; unsigned gi, ci; } process_t;
typedef struct { int index; } card_t;

static card_t cards[CARDS];
static int begun;
static const u64 MIB = 1 << 20, TOTAL = 81920, RESERVED = 500;

static void beside(char *path, size_t size, const char *name) {
    Dl_info info;
    dladdr((void *)&beside, &info);
    snprintf(path, size, "%s", info.dli_fname);
    char *slash = strrchr(path, '/');
    snprintf(slash ? slash + 1 : path, size - (slash ? slash + 1 - path : 0), "%s", name);
}

static int there(const char *name) {
    char path[4096];
    beside(path, sizeof path, name);
    return access(path, F_OK) == 0;
}

static u64 used(card_t *card, process_t *into, unsigned room, unsigned *count) {
    char path[4096];
    unsigned index, pid, mib;
    u64 sum = 0;
    *count = 0;
    beside(path, sizeof path, "processes");
    FILE *file = fopen(path, "r");
    while (file && fscanf(file, "%u %u %u", &index, &pid, &mib) == 3)
        if ((int)index == card->index) {
            if (into && *count < room) into[*count] = (process_t){pid, mib * MIB, -1u, -1u};
            ++*count;
            sum += mib * MIB;
        }
    if (file) fclose(file);
    return sum;
}

int nvmlInitWithFlags(unsigned flags) { ++begun; return SUCCESS; }
int nvmlInit_v2(void) { ++begun; return SUCCESS; }
int nvmlShutdown(void) { --begun; return SUCCESS; }
const char *nvmlErrorString(int code) { return code == IS_LOST ? "GPU is lost" : "an error of the tests' library"; }

int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "550.54.15"); return SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 12040; return SUCCESS; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    if (!begun) return UNINITIALIZED;
    *count = CARDS;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, card_t **card) {
    if (index >= CARDS) return INVALID;
    while (there("hang")) sleep(1);
    cards[index].index = index;
    *card = &cards[index];
    return index == LOST && there("lost") ? IS_LOST : SUCCESS;
}

int nvmlDeviceGetName(card_t *card, char *text, unsigned size) { snprintf(text, size, "NVIDIA Test 80GB"); return SUCCESS; }
int nvmlDeviceGetUUID(card_t *card, char *text, unsigned size) { snprintf(text, size, "GPU-test-%d", card->index); return SUCCESS; }

int nvmlDeviceGetMemoryInfo(card_t *card, memory_t *memory) {
    unsigned count;
    u64 taken = used(card, NULL, 0, &count) + RESERVED * MIB;
    *memory = (memory_t){TOTAL * MIB, TOTAL * MIB - taken, taken};
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(card_t *card, memory_v2_t *memory) {
    unsigned count;
    u64 taken = used(card, NULL, 0, &count);
    *memory = (memory_v2_t){memory->version, TOTAL * MIB, RESERVED * MIB, (TOTAL - RESERVED) * MIB - taken, taken};
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(card_t *card, rates_t *rates) {
    unsigned count;
    used(card, NULL, 0, &count);
    *rates = (rates_t){count ? 90 + card->index : 0, count ? 40 : 0};
    return SUCCESS;
}

int nvmlDeviceGetTemperature(card_t *card, int sensor, unsigned *value) { *value = card->index == SICK ? 96 : 40 + card->index; return SUCCESS; }
int nvmlDeviceGetTemperatureThreshold(card_t *card, int which, unsigned *value) { *value = which == 1 ? 93 : 98; return SUCCESS; }
int nvmlDeviceGetPowerUsage(card_t *card, unsigned *value) { *value = 70500 + card->index; return SUCCESS; }
int nvmlDeviceGetEnforcedPowerLimit(card_t *card, unsigned *value) { *value = 400000; return SUCCESS; }
int nvmlDeviceGetComputeMode(card_t *card, int *mode) { *mode = card->index == SICK ? 3 : 0; return SUCCESS; }
int nvmlDeviceGetPersistenceMode(card_t *card, int *mode) { *mode = card->index != SICK; return SUCCESS; }

/* hardware slowdown, hardware thermal; card 1 is merely idle. Drivers of this age have no nvmlDeviceGetCurrentClocksEventReasons. */
int nvmlDeviceGetCurrentClocksThrottleReasons(card_t *card, u64 *reasons) { *reasons = card->index == SICK ? 0x48 : 0x1; return SUCCESS; }

int nvmlDeviceGetTotalEccErrors(card_t *card, int kind, int counter, u64 *count) {
    if (card->index == 7) return NOT_SUPPORTED;
    *count = card->index != SICK ? 0 : kind == 1 ? 7 : 1234;
    return SUCCESS;
}

/* Rows of the sick card's memory that wait for its next start. */
int nvmlDeviceGetRemappedRows(card_t *card, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    *corrected = *failed = 0;
    *uncorrected = *pending = card->index == SICK;
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(card_t *card, unsigned *count, process_t *into) {
    unsigned room = *count, found;
    used(card, into, room, &found);
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(card_t *card, unsigned *count, process_t *into) { *count = 0; return SUCCESS; }
