/*
 * A driver for a GPU that is not there.
 *
 * The calls of libcuda that fraglab uses, done with Linux virtual memory, so that everything that
 * talks to a GPU is tested where there is none:
 *
 *   physical memory   one sparse file in memory (memfd); a handle is an offset into it
 *   reservation       a range of addresses without access
 *   mapping           the file mapped into the range at the handle's offset: the same memory at two
 *                     addresses really is the same, and a range without a mapping has nothing
 *   kernels           the two of kernels.ptx, by name, as C loops; they look into the table of
 *                     mappings first, and what is not mapped or not accessible is error 700, which
 *                     every later call answers too, as on a real GPU
 *
 * What it does not do: streams run at once, memory is not cleared.
 *
 * A test may also say that a kernel runs, or a graph is captured:
 *
 *   fake_cuda_kernel(address, size)  a kernel uses this range until something waits for the GPU (a
 *                                    synchronize of the context, a stream or an event; cuMemFree);
 *                                    memory that is unmapped under it is error 700
 *   fake_cuda_capture(on)            while it is on, cuCtxSynchronize answers error 900 and spoils
 *                                    the capture; says whether the last one is spoiled
 *   fake_cuda_synchronizes()         calls of cuCtxSynchronize so far
 *
 * Environment:
 *   FAKE_CUDA_MEMORY=BYTES     physical memory of each GPU (8 GiB); what is not touched costs nothing
 *   FAKE_CUDA_DEVICES=N        how many GPUs (1), at most 8
 *   FAKE_CUDA_LATENCY=on       calls take the time of the table `costs` below
 *   FAKE_CUDA_BUSY=N           an event answers "not yet" N times before it has happened (0)
 *   FAKE_CUDA_FAIL=LIST        "create 12, map all 700": the 12th create is refused as out of memory,
 *                              every map with error 700; malloc free address_reserve address_free
 *                              create release map unmap set_access, counted from 1 over all GPUs
 *   FAKE_CUDA_LEAK_CHECK=FILE  what is held when the last context is released, and again when the
 *                              process ends, one line: "mallocs 0 handles 0 mappings 0 ..."
 *   FAKE_CUDA_VMM=off          a GPU without virtual memory calls
 *   FAKE_CUDA_GRANULARITY=BYTES  another unit than 2 MiB
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;

enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100,
    INVALID_DEVICE = 101, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500,
    NOT_READY = 600, ILLEGAL_ADDRESS = 700, NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900
};

#define API __attribute__((visibility("default")))
#define UNIT (2ull << 20)
#define SMALL (1ull << 20)
#define DEVICES_MAX 8
#define MIB 1048576.0

/* ------------------------------------------------------------------------------------------------
 * Calls that may be made to fail and that take time.
 */

enum call { MALLOC, FREE, ADDRESS_RESERVE, ADDRESS_FREE, CREATE, RELEASE, MAP, UNMAP, SET_ACCESS,
            CALLS };

static const char *const call_names[CALLS] = {
    "malloc", "free", "address_reserve", "address_free", "create", "release", "map", "unmap",
    "set_access"
};

/* Microseconds: for any call, and for each MiB of its range. */
static const double costs[CALLS][2] = {
    [MALLOC] = {40, 0.25}, [FREE] = {30, 0.15}, [ADDRESS_RESERVE] = {3, 0}, [ADDRESS_FREE] = {2, 0},
    [CREATE] = {8, 0.05}, [RELEASE] = {6, 0.05}, [MAP] = {1, 0}, [UNMAP] = {15, 0.01},
    [SET_ACCESS] = {20, 0.03}
};

/* ------------------------------------------------------------------------------------------------
 * What there is. One lock around everything.
 */

struct range { uint64_t base, size, offset; int device, access, kind; uint64_t piece; };

/* Ranges that do not overlap, by base. */
struct table { struct range *at; size_t count, room; };

struct piece { uint64_t size, offset, mappings; int device, held; };

struct device { uint64_t used, small; int contexts; };

/* A context is a device; its address is what callers see. */
static struct device devices[DEVICES_MAX];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int started, device_count = 1, virtual_memory = 1, latency, memory_file = -1;
static uint64_t busy;
static uint64_t memory_bytes = 8ull << 30, granularity = UNIT, file_end;
static struct table mallocs, reservations, mappings;
static struct piece *pieces;
static size_t piece_count, handles_held;
static long modules, streams, events;
static uint64_t seen[CALLS];
static struct { uint64_t base, size; } running[64]; /* ranges that kernels use */
static size_t running_count;
static uint64_t synchronizes;
static int capturing, spoiled;
static CUresult broken; /* the error that every call answers from now on */
static __thread struct device *current;

static size_t find(const struct table *table, uint64_t address) /* first range with base > address */
{
    size_t low = 0, high = table->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (table->at[middle].base <= address) low = middle + 1; else high = middle;
    }
    return low;
}

/* The range that holds the address. */
static struct range *holding(const struct table *table, uint64_t address)
{
    size_t next = find(table, address);
    if (next == 0) return NULL;
    struct range *range = &table->at[next - 1];
    return address - range->base < range->size ? range : NULL;
}

static void insert(struct table *table, struct range range)
{
    if (table->count == table->room) {
        table->room = table->room ? 2 * table->room : 64;
        table->at = realloc(table->at, table->room * sizeof *table->at);
        if (!table->at) abort();
    }
    size_t place = find(table, range.base);
    memmove(&table->at[place + 1], &table->at[place], (table->count - place) * sizeof range);
    table->at[place] = range;
    table->count++;
}

static void strike(struct table *table, struct range *range)
{
    size_t place = (size_t)(range - table->at);
    table->count--;
    memmove(range, range + 1, (table->count - place) * sizeof *range);
}

/* ------------------------------------------------------------------------------------------------
 * Environment.
 */

static int word_is(const char *text, const char *word)
{
    size_t length = strlen(word);
    return strncmp(text, word, length) == 0 && (text[length] == ' ' || text[length] == '\0'
                                                || text[length] == ',');
}

/* What FAKE_CUDA_FAIL says of the call that is under way. */
static CUresult injected(enum call call)
{
    const char *text = getenv("FAKE_CUDA_FAIL");
    uint64_t nth = ++seen[call];
    while (text && *text) {
        while (*text == ' ' || *text == ',') text++;
        if (word_is(text, call_names[call])) {
            char *end;
            const char *which = text + strlen(call_names[call]);
            while (*which == ' ') which++;
            int hit = word_is(which, "all");
            if (hit) end = (char *)which + 3;
            else hit = strtoull(which, &end, 10) == nth;
            if (hit) {
                long code = strtol(end, NULL, 10);
                return code ? (CUresult)code : OUT_OF_MEMORY;
            }
        }
        text = strchr(text, ',');
    }
    return SUCCESS;
}

static void spend(enum call call, uint64_t size, uint64_t count)
{
    if (!latency) return;
    double us = costs[call][0] * (double)count + costs[call][1] * ((double)size / MIB);
    struct timespec begin, now;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    do clock_gettime(CLOCK_MONOTONIC, &now);
    while ((double)(now.tv_sec - begin.tv_sec) * 1e6 + (double)(now.tv_nsec - begin.tv_nsec) / 1e3
           < us);
}

static uint64_t number_of(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 10) : otherwise;
}

static int is_set(const char *name, const char *value)
{
    const char *text = getenv(name);
    return text && strcmp(text, value) == 0;
}

static void write_leaks(void)
{
    const char *path = getenv("FAKE_CUDA_LEAK_CHECK");
    FILE *file = path ? fopen(path, "w") : NULL;
    if (!file) return;
    long contexts = 0;
    for (int at = 0; at < DEVICES_MAX; at++) contexts += devices[at].contexts;
    fprintf(file, "mallocs %zu handles %zu mappings %zu reservations %zu contexts %ld modules %ld "
            "streams %ld events %ld\n", mallocs.count, handles_held, mappings.count,
            reservations.count, contexts, modules, streams, events);
    fclose(file);
}

__attribute__((destructor)) static void process_ends(void)
{
    if (started) write_leaks();
}

/* ------------------------------------------------------------------------------------------------
 * Physical memory.
 */

static uint64_t units(uint64_t bytes) { return (bytes + UNIT - 1) / UNIT * UNIT; }

/* Charges physical bytes to a device. Small mallocs share units. */
static int take(struct device *device, uint64_t size, int small)
{
    uint64_t more = small ? units(device->small + size) - units(device->small) : units(size);
    if (more < size && !small) return 0;
    if (more > memory_bytes - device->used) return 0;
    device->used += more;
    if (small) device->small += size;
    return 1;
}

static void give_back(struct device *device, uint64_t size, int small)
{
    if (small) {
        device->used -= units(device->small) - units(device->small - size);
        device->small -= size;
    } else {
        device->used -= units(size);
    }
}

/* A stretch of the file that nobody has. Offsets are never used again: the file is sparse. */
static int extend(uint64_t size, uint64_t *offset)
{
    uint64_t span = units(size);
    if (memory_file < 0) memory_file = memfd_create("fake_cuda", MFD_CLOEXEC);
    if (memory_file < 0 || ftruncate(memory_file, (off_t)(file_end + span)) != 0) return 0;
    *offset = file_end;
    file_end += span;
    return 1;
}

static void punch(uint64_t offset, uint64_t size)
{
    if (fallocate(memory_file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset,
                  (off_t)units(size)) != 0) return; /* the memory stays with us: no harm */
}

/* A range of addresses without access, at a multiple of 2 MiB. */
static uint64_t addresses(uint64_t size)
{
    uint64_t span = units(size) + UNIT;
    void *raw = mmap(NULL, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) return 0;
    uint64_t begin = (uint64_t)raw, base = units(begin), end = base + units(size);
    if (base > begin) munmap(raw, base - begin);
    if (begin + span > end) munmap((void *)end, begin + span - end);
    return base;
}

static int show(uint64_t address, uint64_t size, uint64_t offset, int access)
{
    return mmap((void *)address, size, access ? PROT_READ | PROT_WRITE : PROT_NONE,
                MAP_SHARED | MAP_FIXED, memory_file, (off_t)offset) != MAP_FAILED;
}

static int hide(uint64_t address, uint64_t size)
{
    return mmap((void *)address, size, PROT_NONE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED;
}

static void drop_piece(struct piece *piece)
{
    if (piece->held || piece->mappings) return;
    give_back(&devices[piece->device], piece->size, 0);
    punch(piece->offset, piece->size);
}

/* ------------------------------------------------------------------------------------------------
 * Every call: LEAVE unlocks and answers.
 */

#define ENTER pthread_mutex_lock(&lock)
#define LEAVE(code) do { CUresult answer_ = (code); pthread_mutex_unlock(&lock); return answer_; } \
                    while (0)
#define IN_CONTEXT do { ENTER; if (!started) LEAVE(NOT_INITIALIZED); \
                        if (!current || !current->contexts) LEAVE(INVALID_CONTEXT); \
                        if (broken) LEAVE(broken); } while (0)
#define MAY(call, size) do { CUresult refused_ = injected(call); if (refused_) LEAVE(refused_); \
                             spend(call, size, 1); } while (0)

API CUresult cuInit(unsigned flags)
{
    ENTER;
    if (flags) LEAVE(INVALID_VALUE);
    if (!started) {
        device_count = (int)number_of("FAKE_CUDA_DEVICES", 1);
        if (device_count > DEVICES_MAX) device_count = DEVICES_MAX;
        memory_bytes = number_of("FAKE_CUDA_MEMORY", memory_bytes) / UNIT * UNIT;
        granularity = number_of("FAKE_CUDA_GRANULARITY", granularity);
        virtual_memory = !is_set("FAKE_CUDA_VMM", "off");
        busy = number_of("FAKE_CUDA_BUSY", 0);
        latency = is_set("FAKE_CUDA_LATENCY", "on");
        started = 1;
    }
    LEAVE(device_count > 0 ? SUCCESS : NO_DEVICE);
}

API CUresult cuDriverGetVersion(int *version)
{
    *version = 12080;
    return SUCCESS;
}

API CUresult cuGetErrorName(CUresult error, const char **name)
{
    *name = error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
          : error == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OTHER";
    return SUCCESS;
}

API CUresult cuGetErrorString(CUresult error, const char **text)
{
    return cuGetErrorName(error, text);
}

API CUresult cuDeviceGetCount(int *count)
{
    *count = device_count;
    return started ? SUCCESS : NOT_INITIALIZED;
}

API CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    if (ordinal < 0 || ordinal >= device_count) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

API CUresult cuDeviceGetName(char *name, int room, CUdevice device)
{
    snprintf(name, (size_t)room, "Fake GPU %d", device);
    return SUCCESS;
}

API CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    (void)device;
    *bytes = memory_bytes;
    return SUCCESS;
}

API CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    (void)device;
    switch (attribute) {
    case 16: *value = 4; break;               /* multiprocessors */
    case 75: *value = 9; break;               /* compute capability, major */
    case 76: *value = 0; break;               /* and minor */
    case 102: *value = virtual_memory; break; /* virtual memory calls */
    default: *value = 0;
    }
    return SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(void **context, CUdevice device)
{
    ENTER;
    if (!started) LEAVE(NOT_INITIALIZED);
    if (device < 0 || device >= device_count) LEAVE(INVALID_DEVICE);
    devices[device].contexts++;
    *context = &devices[device];
    LEAVE(SUCCESS);
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    ENTER;
    if (device < 0 || device >= device_count || !devices[device].contexts) LEAVE(INVALID_CONTEXT);
    int left = 0;
    devices[device].contexts--;
    for (int at = 0; at < DEVICES_MAX; at++) left += devices[at].contexts;
    if (!left) write_leaks();
    LEAVE(SUCCESS);
}

API CUresult cuCtxSetCurrent(void *context)
{
    current = context;
    return SUCCESS;
}

API CUresult cuCtxGetCurrent(void **context)
{
    *context = current;
    return started ? SUCCESS : NOT_INITIALIZED;
}

API CUresult cuCtxSynchronize(void)
{
    IN_CONTEXT;
    synchronizes++;
    spoiled |= capturing;
    if (capturing) LEAVE(CAPTURE_UNSUPPORTED);
    running_count = 0;
    LEAVE(SUCCESS);
}

API void fake_cuda_kernel(CUdeviceptr address, size_t size)
{
    ENTER;
    if (running_count == sizeof running / sizeof *running) abort();
    running[running_count].base = address;
    running[running_count++].size = size;
    pthread_mutex_unlock(&lock);
}

API int fake_cuda_capture(int on)
{
    ENTER;
    if (on) spoiled = 0;
    capturing = on;
    LEAVE(spoiled);
}

API uint64_t fake_cuda_synchronizes(void)
{
    ENTER;
    uint64_t count = synchronizes;
    pthread_mutex_unlock(&lock);
    return count;
}

/* Whether a kernel uses a part of the range. */
static int in_use(uint64_t address, uint64_t size)
{
    for (size_t at = 0; at < running_count; at++)
        if (running[at].base < address + size && address < running[at].base + running[at].size)
            return 1;
    return 0;
}

API CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
    IN_CONTEXT;
    *free_bytes = memory_bytes - current->used;
    *total_bytes = memory_bytes;
    LEAVE(SUCCESS);
}

/* ------------------------------------------------------------------------------------------------
 * Mallocs: memory and addresses at once. Each has a stretch of the file of its own, also a small one;
 * that it shares a unit with others is only charged so.
 */

API CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size)
{
    IN_CONTEXT;
    MAY(MALLOC, size);
    struct range range = {.size = size, .device = (int)(current - devices), .access = 1};
    int small = size < SMALL;
    if (!size) LEAVE(INVALID_VALUE);
    if (!take(current, size, small)) LEAVE(OUT_OF_MEMORY);
    range.base = addresses(size);
    if (!range.base || !extend(size, &range.offset)
        || !show(range.base, units(size), range.offset, 1)) {
        if (range.base) munmap((void *)range.base, units(size));
        give_back(current, size, small);
        LEAVE(OUT_OF_MEMORY);
    }
    insert(&mallocs, range);
    *address = range.base;
    LEAVE(SUCCESS);
}

API CUresult cuMemFree_v2(CUdeviceptr address)
{
    IN_CONTEXT;
    struct range *range = holding(&mallocs, address);
    if (!range || range->base != address) LEAVE(INVALID_VALUE);
    MAY(FREE, range->size);
    running_count = 0;
    give_back(&devices[range->device], range->size, range->size < SMALL);
    munmap((void *)address, units(range->size));
    punch(range->offset, range->size);
    strike(&mallocs, range);
    LEAVE(SUCCESS);
}

/* ------------------------------------------------------------------------------------------------
 * Virtual memory.
 */

API CUresult cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option)
{
    (void)properties, (void)option;
    if (!virtual_memory) return NOT_SUPPORTED;
    *bytes = granularity;
    return SUCCESS;
}

API CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment,
                                 CUdeviceptr wish, unsigned long long flags)
{
    (void)wish;
    IN_CONTEXT;
    MAY(ADDRESS_RESERVE, size);
    if (!virtual_memory) LEAVE(NOT_SUPPORTED);
    if (!size || size % granularity || alignment > UNIT || flags) LEAVE(INVALID_VALUE);
    struct range range = {.base = addresses(size), .size = size};
    if (!range.base) LEAVE(OUT_OF_MEMORY);
    insert(&reservations, range);
    *address = range.base;
    LEAVE(SUCCESS);
}

API CUresult cuMemAddressFree(CUdeviceptr address, size_t size)
{
    IN_CONTEXT;
    MAY(ADDRESS_FREE, size);
    struct range *range = holding(&reservations, address);
    if (!range || range->base != address || range->size != size) LEAVE(INVALID_VALUE);
    size_t next = find(&mappings, address + size - 1);
    if (next && mappings.at[next - 1].base >= address) LEAVE(INVALID_VALUE);
    munmap((void *)address, units(size));
    strike(&reservations, range);
    LEAVE(SUCCESS);
}

/* The first fields of CUmemAllocationProp: type, handle types, location type, location id. */
API CUresult cuMemCreate(uint64_t *handle, size_t size, const int *properties,
                         unsigned long long flags)
{
    IN_CONTEXT;
    MAY(CREATE, size);
    if (!virtual_memory) LEAVE(NOT_SUPPORTED);
    if (!size || size % granularity || flags) LEAVE(INVALID_VALUE);
    if (properties[0] != 1 || properties[2] != 1) LEAVE(INVALID_VALUE); /* pinned, on a device */
    if (properties[3] < 0 || properties[3] >= device_count) LEAVE(INVALID_DEVICE);
    struct piece piece = {.size = size, .device = properties[3], .held = 1};
    if (!take(&devices[piece.device], size, 0)) LEAVE(OUT_OF_MEMORY);
    struct piece *more = realloc(pieces, (piece_count + 1) * sizeof *pieces);
    if (more) pieces = more;
    if (!more || !extend(size, &piece.offset)) {
        give_back(&devices[piece.device], size, 0);
        LEAVE(OUT_OF_MEMORY);
    }
    pieces[piece_count++] = piece;
    handles_held++;
    *handle = piece_count; /* counted from 1: 0 is no handle */
    LEAVE(SUCCESS);
}

static struct piece *piece_of(uint64_t handle)
{
    if (!handle || handle > piece_count || !pieces[handle - 1].held) return NULL;
    return &pieces[handle - 1];
}

API CUresult cuMemRelease(uint64_t handle)
{
    IN_CONTEXT;
    struct piece *piece = piece_of(handle);
    if (!piece) LEAVE(INVALID_VALUE);
    MAY(RELEASE, piece->size);
    piece->held = 0;
    handles_held--;
    drop_piece(piece);
    LEAVE(SUCCESS);
}

API CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, uint64_t handle,
                      unsigned long long flags)
{
    IN_CONTEXT;
    MAY(MAP, size);
    struct piece *piece = piece_of(handle);
    struct range *reserved = holding(&reservations, address);
    if (!piece || offset || flags || size != piece->size || address % granularity)
        LEAVE(INVALID_VALUE);
    if (!reserved || size > reserved->base + reserved->size - address) LEAVE(INVALID_VALUE);
    size_t next = find(&mappings, address + size - 1);
    if (next && mappings.at[next - 1].base + mappings.at[next - 1].size > address)
        LEAVE(INVALID_VALUE);
    if (!show(address, size, piece->offset, 0)) LEAVE(OUT_OF_MEMORY);
    piece->mappings++;
    insert(&mappings, (struct range){.base = address, .size = size, .offset = piece->offset,
                                     .piece = handle});
    LEAVE(SUCCESS);
}

/* How many whole mappings make up the range; 0 if they do not do so exactly. */
static uint64_t tiles(uint64_t address, uint64_t size)
{
    uint64_t at = address, count = 0;
    while (at < address + size) {
        struct range *range = holding(&mappings, at);
        if (!range || range->base != at) return 0;
        at += range->size;
        count++;
    }
    return at == address + size ? count : 0;
}

API CUresult cuMemUnmap(CUdeviceptr address, size_t size)
{
    IN_CONTEXT;
    uint64_t count = tiles(address, size);
    if (!count) LEAVE(INVALID_VALUE);
    CUresult refused = injected(UNMAP);
    if (refused) LEAVE(refused);
    spend(UNMAP, size, count);
    if (in_use(address, size)) broken = ILLEGAL_ADDRESS; /* the kernel fails, not the call */
    if (!hide(address, size)) LEAVE(OUT_OF_MEMORY);
    for (; count; count--) {
        struct range *range = holding(&mappings, address);
        struct piece *piece = &pieces[range->piece - 1];
        address += range->size;
        piece->mappings--;
        drop_piece(piece);
        strike(&mappings, range);
    }
    LEAVE(SUCCESS);
}

/* CUmemAccessDesc: location type, location id, flags. */
API CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const int *access, size_t descriptions)
{
    IN_CONTEXT;
    uint64_t count = tiles(address, size);
    if (!count || descriptions != 1 || access[0] != 1) LEAVE(INVALID_VALUE);
    CUresult refused = injected(SET_ACCESS);
    if (refused) LEAVE(refused);
    spend(SET_ACCESS, size, count);
    int open = access[2] == 3;
    if (mprotect((void *)address, size, open ? PROT_READ | PROT_WRITE : PROT_NONE) != 0)
        LEAVE(OUT_OF_MEMORY);
    for (uint64_t at = address; at < address + size;) {
        struct range *range = holding(&mappings, at);
        range->access = open;
        at += range->size;
    }
    LEAVE(SUCCESS);
}

/* ------------------------------------------------------------------------------------------------
 * What runs on the GPU.
 */

/* Whether all of a range can be read and written; otherwise nothing works any more. */
static int reach(uint64_t address, uint64_t size)
{
    uint64_t at = address;
    while (at < address + size) {
        struct range *range = holding(&mappings, at);
        if (!range) range = holding(&mallocs, at);
        if (!range || !range->access) {
            broken = ILLEGAL_ADDRESS;
            return 0;
        }
        at = range->base + range->size;
        if (range->piece == 0) at = range->base + units(range->size); /* a malloc fills its pages */
    }
    return 1;
}

API CUresult cuMemcpyDtoHAsync_v2(void *host, CUdeviceptr address, size_t size, void *stream)
{
    (void)stream;
    IN_CONTEXT;
    if (reach(address, size)) memcpy(host, (void *)address, size);
    LEAVE(SUCCESS);
}

API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr address, const void *host, size_t size, void *stream)
{
    (void)stream;
    IN_CONTEXT;
    if (reach(address, size)) memcpy((void *)address, host, size);
    LEAVE(SUCCESS);
}

API CUresult cuMemsetD32Async(CUdeviceptr address, unsigned value, size_t words, void *stream)
{
    (void)stream;
    IN_CONTEXT;
    if (reach(address, 4 * words))
        for (size_t at = 0; at < words; at++) ((uint32_t *)address)[at] = value;
    LEAVE(SUCCESS);
}

static int fill_kernel, check_kernel;

API CUresult cuModuleLoadData(void **module, const void *image)
{
    IN_CONTEXT;
    if (!strstr(image, ".visible .entry fraglab_fill") || !strstr(image, "fraglab_check"))
        LEAVE(NOT_FOUND);
    modules++;
    *module = &modules;
    LEAVE(SUCCESS);
}

API CUresult cuModuleUnload(void *module)
{
    (void)module;
    IN_CONTEXT;
    modules--;
    LEAVE(SUCCESS);
}

API CUresult cuModuleGetFunction(void **function, void *module, const char *name)
{
    (void)module;
    if (strcmp(name, "fraglab_fill") == 0) *function = &fill_kernel;
    else if (strcmp(name, "fraglab_check") == 0) *function = &check_kernel;
    else return NOT_FOUND;
    return SUCCESS;
}

/* The word at an index, as kernels.ptx computes it. */
static uint32_t word_at(uint64_t key, uint64_t index)
{
    uint64_t mixed = key + index * 0x9e3779b97f4a7c15ull;
    mixed = (mixed ^ mixed >> 32) * 0xd6e8feb86659fd93ull;
    return (uint32_t)(mixed ^ mixed >> 32);
}

/* fill(address, words, key); check(address, words, key, result): result holds the number of words
 * that differ and the smallest index of one. */
API CUresult cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                            unsigned by, unsigned bz, unsigned shared, void *stream, void **params,
                            void **extra)
{
    (void)gy, (void)gz, (void)by, (void)bz, (void)shared, (void)stream, (void)extra;
    IN_CONTEXT;
    if (!gx || !bx || bx > 1024) LEAVE(INVALID_VALUE);
    uint64_t address = *(uint64_t *)params[0], words = *(uint64_t *)params[1];
    uint64_t key = *(uint64_t *)params[2];
    uint32_t *memory = (uint32_t *)address;
    if (!reach(address, 4 * words)) LEAVE(SUCCESS); /* a kernel's error shows when one waits */
    if (function == &fill_kernel) {
        for (uint64_t at = 0; at < words; at++) memory[at] = word_at(key, at);
    } else if (function == &check_kernel) {
        uint64_t *result = *(uint64_t **)params[3];
        if (!reach((uint64_t)result, 16)) LEAVE(SUCCESS);
        for (uint64_t at = 0; at < words; at++) {
            if (memory[at] == word_at(key, at)) continue;
            result[0]++;
            if (at < result[1]) result[1] = at;
        }
    } else {
        LEAVE(INVALID_HANDLE);
    }
    LEAVE(SUCCESS);
}

API CUresult cuStreamCreate(void **stream, unsigned flags)
{
    (void)flags;
    IN_CONTEXT;
    *stream = (void *)(uintptr_t)(0x1000 + 16 * ++streams);
    LEAVE(SUCCESS);
}

API CUresult cuStreamDestroy_v2(void *stream)
{
    (void)stream;
    IN_CONTEXT;
    streams--;
    LEAVE(SUCCESS);
}

API CUresult cuStreamSynchronize(void *stream)
{
    (void)stream;
    IN_CONTEXT;
    running_count = 0;
    LEAVE(SUCCESS);
}

/* The mode of a thread is kept, and changes nothing: there are no captures. */
API CUresult cuThreadExchangeStreamCaptureMode(int *mode)
{
    static __thread int current;
    int before = current;
    current = *mode;
    *mode = before;
    return SUCCESS;
}

/* An event is how often it still answers "not yet". */
API CUresult cuEventCreate(void **event, unsigned flags)
{
    (void)flags;
    IN_CONTEXT;
    *event = calloc(1, sizeof(uint64_t));
    if (!*event) LEAVE(OUT_OF_MEMORY);
    events++;
    LEAVE(SUCCESS);
}

API CUresult cuEventDestroy_v2(void *event)
{
    IN_CONTEXT;
    free(event);
    events--;
    LEAVE(SUCCESS);
}

API CUresult cuEventRecord(void *event, void *stream)
{
    (void)stream;
    IN_CONTEXT;
    *(uint64_t *)event = busy;
    LEAVE(SUCCESS);
}

API CUresult cuEventQuery(void *event)
{
    uint64_t *left = event;
    IN_CONTEXT;
    if (!*left) LEAVE(SUCCESS);
    --*left;
    LEAVE(NOT_READY);
}

API CUresult cuEventSynchronize(void *event)
{
    IN_CONTEXT;
    *(uint64_t *)event = 0;
    running_count = 0;
    LEAVE(SUCCESS);
}
