/* What moving, placing and updating model data costs: the link between host and GPU, and the host.
 *
 * Prints CSV, one line for a measure, a size and a number of threads: microseconds of the first
 * (warm-up) round, and the median, least and most of the rounds after it. Every time is wall clock
 * around the call and the wait for the GPU, as a program sees it that moves one chunk at a time.
 *
 *   touch                      first write to each page of a fresh mapping
 *   touch_small, touch_huge    the same, huge pages forbidden and asked for
 *   unmap                      giving that mapping back
 *   pinned_alloc, pinned_free  cuMemAllocHost, cuMemFreeHost
 *   pinned_h2d, pinned_d2h     cuMemcpyHtoD, cuMemcpyDtoH from and to pinned memory
 *   pageable_h2d, pageable_d2h the same from and to memory of mmap, every page touched before
 *   fresh_d2h                  cuMemcpyDtoH to a fresh mapping, so page faults included
 *   device_copy                cuMemcpyDtoD; bytes are those copied, the memory moves twice that
 *   device_fill                cuMemsetD8
 *   device_triad               c = a + 3 b on fp32 by a kernel; bytes are those of all three
 *   gpu_malloc, gpu_free       cuMemAlloc, cuMemFree
 *   host_fill, host_copy       memset; memcpy, whose bytes are those read and those written
 *   host_triad                 c = a + 3 b on fp32; bytes are those of all three
 *   host_adam32, host_adam16   one ADAM step, fp32 or fp16 gradient; bytes are parameters (!)
 *   peer_copy                  cuMemcpyPeer from GPU 0 to GPU 1 over the direct link
 *   all_gather, reduce_scatter, broadcast   NCCL over all GPUs; bytes received by a rank
 *
 * Copies walk through a buffer of 2 GiB, so that the host's cache does not hold what they read. The
 * host loops split arrays of 1 GiB among threads that start each round together. Peer copies and
 * collectives need two GPUs, collectives also libnccl.so.2 on the library path.
 *
 * Build and run: cc -O3 -fno-math-errno benches/link_costs.c -ldl -lpthread -o link_costs
 *                ./link_costs > link_costs.csv      (or ./link_costs peer: the last four only)
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)
#define GIB ((size_t)1 << 30)
#define MAX_ROUNDS 64
#define MAX_THREADS 256
#define MAX_GPUS 16
#if defined(__x86_64__)
/* The same loop for each vector width; the machine's is chosen when the program starts. */
#define VECTOR __attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default")))
#define F16C __attribute__((target("avx2,f16c")))
#else
#define VECTOR
#define F16C
#endif
/* Elements that a thread's part of a loop is a multiple of. */
#define BLOCK ((size_t)1024)

typedef int Result;
typedef int Device;
typedef void *Context, *Stream, *Module, *Function;
typedef unsigned long long Pointer;

/* The driver's functions that are used: name here, name in the library, arguments. */
#define DRIVER(X)                                                                                  \
  X(init, "cuInit", (unsigned))                                                                    \
  X(driver_version, "cuDriverGetVersion", (int *))                                                 \
  X(device_count, "cuDeviceGetCount", (int *))                                                     \
  X(device_get, "cuDeviceGet", (Device *, int))                                                    \
  X(device_name, "cuDeviceGetName", (char *, int, Device))                                         \
  X(context_retain, "cuDevicePrimaryCtxRetain", (Context *, Device))                               \
  X(context_set, "cuCtxSetCurrent", (Context))                                                     \
  X(synchronize, "cuCtxSynchronize", (void))                                                       \
  X(host_alloc, "cuMemAllocHost_v2", (void **, size_t))                                            \
  X(host_free, "cuMemFreeHost", (void *))                                                          \
  X(gpu_alloc, "cuMemAlloc_v2", (Pointer *, size_t))                                               \
  X(gpu_free, "cuMemFree_v2", (Pointer))                                                           \
  X(copy_h2d, "cuMemcpyHtoD_v2", (Pointer, const void *, size_t))                                  \
  X(copy_d2h, "cuMemcpyDtoH_v2", (void *, Pointer, size_t))                                        \
  X(copy_d2d, "cuMemcpyDtoD_v2", (Pointer, Pointer, size_t))                                       \
  X(fill_d8, "cuMemsetD8_v2", (Pointer, unsigned char, size_t))                                    \
  X(can_access, "cuDeviceCanAccessPeer", (int *, Device, Device))                                  \
  X(enable_peer, "cuCtxEnablePeerAccess", (Context, unsigned))                                     \
  X(copy_peer, "cuMemcpyPeerAsync", (Pointer, Context, Pointer, Context, size_t, Stream))          \
  X(module_load, "cuModuleLoadData", (Module *, const void *))                                     \
  X(module_function, "cuModuleGetFunction", (Function *, Module, const char *))                    \
  X(launch, "cuLaunchKernel",                                                                      \
    (Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream,       \
     void **, void **))
#define DECLARE(name, symbol, args) static Result(*name) args;
DRIVER(DECLARE)

/* NCCL's: the same for a library that may be missing. `int` stands for its enums. */
#define COLLECTIVES(X)                                                                             \
  X(nccl_version, "ncclGetVersion", (int *))                                                       \
  X(nccl_init, "ncclCommInitAll", (void **, int, const int *))                                     \
  X(nccl_start, "ncclGroupStart", (void))                                                          \
  X(nccl_end, "ncclGroupEnd", (void))                                                              \
  X(nccl_gather, "ncclAllGather", (const void *, void *, size_t, int, void *, Stream))             \
  X(nccl_scatter, "ncclReduceScatter", (const void *, void *, size_t, int, int, void *, Stream))   \
  X(nccl_broadcast, "ncclBroadcast", (const void *, void *, size_t, int, int, void *, Stream))
COLLECTIVES(DECLARE)

static double now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}

static void ok(Result result, const char *what) {
  if (result) {
    fprintf(stderr, "%s: error %d\n", what, result);
    exit(1);
  }
}

static void check(int good, const char *what) {
  if (!good) {
    fprintf(stderr, "wrong result: %s\n", what);
    exit(1);
  }
}

/* ---- Rounds and lines ---- */

typedef struct {
  double first;
  double after[MAX_ROUNDS];
  int rounds;
} Times;

static void add(Times *times, int round, double us) {
  if (round == 0)
    times->first = us;
  else
    times->after[times->rounds++] = us;
}

static int rising(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static void print_line(const char *measure, size_t bytes, int threads, Times *times) {
  qsort(times->after, times->rounds, sizeof *times->after, rising);
  printf("%s,%zu,%d,%d,%.2f,%.2f,%.2f,%.2f\n", measure, bytes, threads, times->rounds, times->first,
         times->after[times->rounds / 2], times->after[0], times->after[times->rounds - 1]);
  fflush(stdout);
}

/* Rounds after the first: odd, so that the median is one of them. */
static int rounds_of(size_t bytes) { return bytes <= 16 * MIB ? 41 : 15; }

/* `advice`: for madvise, MADV_NORMAL for the machine's default. */
static void *map(size_t bytes, int advice) {
  void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) {
    perror("mmap");
    exit(1);
  }
  madvise(at, bytes, advice);
  return at;
}

/* ---- Host memory ---- */

static void touch_pages(const char *measure, size_t bytes, int advice) {
  Times touch = {0}, unmap = {0};
  for (int round = 0; round <= 7; round++) {
    volatile char *at = map(bytes, advice);
    double start = now_us();
    for (size_t i = 0; i < bytes; i += 4096) at[i] = 1;
    double middle = now_us();
    munmap((void *)at, bytes);
    add(&touch, round, middle - start);
    add(&unmap, round, now_us() - middle);
  }
  print_line(measure, bytes, 1, &touch);
  if (advice == MADV_NORMAL) print_line("unmap", bytes, 1, &unmap);
}

typedef struct {
  float *a, *b, *c, *d;
  _Float16 *half;
} Arrays;
typedef void (*Loop)(const Arrays *, size_t start, size_t end);

static void fill_loop(const Arrays *arrays, size_t start, size_t end) {
  memset(arrays->a + start, 0, (end - start) * sizeof(float));
}

static void copy_loop(const Arrays *arrays, size_t start, size_t end) {
  memcpy(arrays->a + start, arrays->b + start, (end - start) * sizeof(float));
}

VECTOR static void triad_loop(const Arrays *arrays, size_t start, size_t end) {
  float *restrict c = arrays->c;
  const float *restrict a = arrays->a, *restrict b = arrays->b;
  for (size_t i = start; i < end; i++) c[i] = a[i] + 3.0f * b[i];
}

/* One ADAM step as the CPU optimizers of DeepSpeed and PatrickStar compute it: bias corrections
 * folded into the step size and the root. */
VECTOR static void adam_step(const float *restrict grad, float *restrict param,
                             float *restrict momentum, float *restrict variance, size_t count) {
  const float beta1 = 0.9f, beta2 = 0.999f, eps = 1e-8f, step = -1e-6f, root_scale = 3.16f;
  for (size_t i = 0; i < count; i++) {
    float m = beta1 * momentum[i] + (1 - beta1) * grad[i];
    float v = beta2 * variance[i] + (1 - beta2) * grad[i] * grad[i];
    param[i] += step * m / (sqrtf(v) * root_scale + eps);
    momentum[i] = m;
    variance[i] = v;
  }
}

static void adam32_loop(const Arrays *arrays, size_t start, size_t end) {
  adam_step(arrays->a + start, arrays->b + start, arrays->c + start, arrays->d + start,
            end - start);
}

/* fp16 to fp32; `count` is a multiple of 8. Compilers of 2022 do not vectorise the cast. */
F16C static void widen(const _Float16 *half, float *single, size_t count) {
#if defined(__x86_64__)
  for (size_t i = 0; i < count; i += 8)
    _mm256_storeu_ps(single + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(half + i))));
#else
  for (size_t i = 0; i < count; i++) single[i] = (float)half[i];
#endif
}

/* Widens a block of gradients into the first cache, then steps. */
static void adam16_loop(const Arrays *arrays, size_t start, size_t end) {
  float grad[BLOCK];
  for (size_t i = start; i < end; i += BLOCK) {
    widen(arrays->half + i, grad, BLOCK);
    adam_step(grad, arrays->b + i, arrays->c + i, arrays->d + i, BLOCK);
  }
}

static void set_loop(const Arrays *arrays, size_t start, size_t end) {
  for (size_t i = start; i < end; i++) {
    arrays->a[i] = 0.001f * (float)(i % 1000 + 1);
    arrays->half[i] = (_Float16)arrays->a[i];
    arrays->b[i] = 1.0f;
    arrays->c[i] = arrays->d[i] = 0.0f;
  }
}

typedef struct {
  const Arrays *arrays;
  Loop loop;
  size_t elements;
  int threads, index, rounds;
  pthread_barrier_t *barrier;
  Times *times;
} Worker;

/* One thread's part of every round; the first thread holds the watch. */
static void *work(void *argument) {
  Worker *worker = argument;
  size_t blocks = worker->elements / BLOCK;
  size_t start = blocks * worker->index / worker->threads * BLOCK;
  size_t end = blocks * (worker->index + 1) / worker->threads * BLOCK;
  for (int round = 0; round <= worker->rounds; round++) {
    pthread_barrier_wait(worker->barrier);
    double begin = now_us();
    worker->loop(worker->arrays, start, end);
    pthread_barrier_wait(worker->barrier);
    if (worker->index == 0) add(worker->times, round, now_us() - begin);
  }
  return NULL;
}

static Times run_threads(const Arrays *arrays, Loop loop, size_t elements, int threads,
                         int rounds) {
  Times times = {0};
  pthread_barrier_t barrier;
  pthread_t ids[MAX_THREADS];
  Worker workers[MAX_THREADS];
  pthread_barrier_init(&barrier, NULL, threads);
  for (int i = 0; i < threads; i++) {
    workers[i] = (Worker){arrays, loop, elements, threads, i, rounds, &barrier, &times};
    ok(pthread_create(&ids[i], NULL, work, &workers[i]), "thread");
  }
  for (int i = 0; i < threads; i++) pthread_join(ids[i], NULL);
  pthread_barrier_destroy(&barrier);
  return times;
}

static void host_loops(int cores, size_t elements) {
  size_t bytes = elements * sizeof(float);
  Arrays arrays = {map(bytes, MADV_NORMAL), map(bytes, MADV_NORMAL), map(bytes, MADV_NORMAL),
                   map(bytes, MADV_NORMAL), map(bytes / 2, MADV_NORMAL)};
  /* Bytes a line states: of the whole arrays touched, or parameters for ADAM. */
  struct {
    const char *measure;
    Loop loop;
    size_t bytes;
  } loops[] = {{"host_adam32", adam32_loop, elements},
               {"host_adam16", adam16_loop, elements},
               {"host_triad", triad_loop, 3 * bytes},
               {"host_copy", copy_loop, 2 * bytes},
               {"host_fill", fill_loop, bytes}};
  run_threads(&arrays, set_loop, elements, cores, 0);
  for (size_t i = 0; i < sizeof loops / sizeof *loops; i++) {
    /* 1, 2, 4 ... and at last all cores. */
    for (int threads = 1, last = 0; !last; threads *= 2) {
      last = threads >= cores;
      Times times = run_threads(&arrays, loops[i].loop, elements, last ? cores : threads, 9);
      print_line(loops[i].measure, loops[i].bytes, last ? cores : threads, &times);
    }
    if (i == 1) check(arrays.b[5] < 1.0f && arrays.b[5] > 0.99f && arrays.c[5] > 0, "host ADAM");
    if (i == 2) check(arrays.c[5] == arrays.a[5] + 3.0f * arrays.b[5], "host triad");
  }
  munmap(arrays.a, bytes);
  munmap(arrays.b, bytes);
  munmap(arrays.c, bytes);
  munmap(arrays.d, bytes);
  munmap(arrays.half, bytes / 2);
}

/* ---- Allocation ---- */

static void pinned_allocations(void) {
  size_t sizes[] = {1024, 768, 512, 384, 256, 128, 64, 32, 16, 8, 4, 2, 1};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    Times alloc = {0}, release = {0};
    for (int round = 0; round <= (sizes[i] > 64 ? 7 : 15); round++) {
      void *at;
      double start = now_us();
      ok(host_alloc(&at, sizes[i] * MIB), "pinned memory");
      double middle = now_us();
      ok(host_free(at), "pinned memory back");
      add(&alloc, round, middle - start);
      add(&release, round, now_us() - middle);
    }
    print_line("pinned_alloc", sizes[i] * MIB, 1, &alloc);
    print_line("pinned_free", sizes[i] * MIB, 1, &release);
  }
}

static void gpu_allocations(void) {
  size_t sizes[] = {2, 8, 32, 64, 96, 128, 192, 256, 288, 320, 384, 448, 512, 576, 640, 768, 1024,
                    2048};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    Times alloc = {0}, release = {0};
    for (int round = 0; round <= 61; round++) {
      Pointer at;
      double start = now_us();
      ok(gpu_alloc(&at, sizes[i] * MIB), "GPU memory");
      double middle = now_us();
      /* A freed block must have been used, or the driver may have done less. */
      ok(fill_d8(at, 1, sizes[i] * MIB), "fill");
      ok(synchronize(), "wait");
      double last = now_us();
      ok(gpu_free(at), "GPU memory back");
      add(&alloc, round, middle - start);
      add(&release, round, now_us() - last);
    }
    print_line("gpu_malloc", sizes[i] * MIB, 1, &alloc);
    print_line("gpu_free", sizes[i] * MIB, 1, &release);
  }
}

/* ---- Copies ---- */

/* Where round `round` of copies of `bytes` starts in a buffer of `span`. */
static size_t walk(int round, size_t bytes, size_t span) {
  /* Small copies stride by 16 MiB, or they would stay within what the last one left in cache. */
  size_t stride = bytes < 16 * MIB ? 16 * MIB : bytes;
  return (size_t)round * stride % (span / stride * stride);
}

static void host_copies(char *host, Pointer gpu, size_t span, const char *up, const char *down) {
  for (size_t bytes = 64 * KIB; bytes <= GIB; bytes *= 2) {
    Times h2d = {0}, d2h = {0};
    for (int round = 0; round <= rounds_of(bytes); round++) {
      size_t at = walk(round, bytes, span);
      double start = now_us();
      ok(copy_h2d(gpu + at, host + at, bytes), up);
      ok(synchronize(), "wait");
      add(&h2d, round, now_us() - start);
    }
    for (int round = 0; round <= rounds_of(bytes); round++) {
      size_t at = walk(round, bytes, span);
      double start = now_us();
      ok(copy_d2h(host + at, gpu + at, bytes), down);
      ok(synchronize(), "wait");
      add(&d2h, round, now_us() - start);
    }
    print_line(up, bytes, 1, &h2d);
    print_line(down, bytes, 1, &d2h);
  }
  ok(fill_d8(gpu, 0x5a, span), "fill");
  ok(copy_d2h(host, gpu, span), "check");
  check(host[0] == 0x5a && host[span - 1] == 0x5a && host[span / 3] == 0x5a, down);
}

static void fresh_copies(Pointer gpu, size_t span) {
  for (size_t bytes = 64 * KIB; bytes <= GIB; bytes *= 4) {
    Times times = {0};
    for (int round = 0; round <= 9; round++) {
      char *host = map(bytes, MADV_NORMAL);
      double start = now_us();
      ok(copy_d2h(host, gpu + walk(round, bytes, span), bytes), "fresh");
      ok(synchronize(), "wait");
      add(&times, round, now_us() - start);
      munmap(host, bytes);
    }
    print_line("fresh_d2h", bytes, 1, &times);
  }
}

static void device_copies(Pointer from, Pointer to, size_t span) {
  for (size_t bytes = 64 * KIB; bytes <= GIB; bytes *= 2) {
    Times copy = {0}, fill = {0};
    for (int round = 0; round <= rounds_of(bytes); round++) {
      size_t at = walk(round, bytes, span);
      double start = now_us();
      ok(copy_d2d(to + at, from + at, bytes), "device copy");
      ok(synchronize(), "wait");
      double middle = now_us();
      ok(fill_d8(from + at, (unsigned char)round, bytes), "device fill");
      ok(synchronize(), "wait");
      add(&copy, round, middle - start);
      add(&fill, round, now_us() - middle);
    }
    print_line("device_copy", bytes, 1, &copy);
    print_line("device_fill", bytes, 1, &fill);
  }
}

/* c = a + 3 b, four numbers a thread; the driver compiles it. */
static const char TRIAD[] =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry triad(.param .u64 a, .param .u64 b, .param .u64 c)\n{\n"
    ".reg .b32 %r<4>; .reg .b64 %d<8>; .reg .f32 %f<9>;\n"
    "ld.param.u64 %d0, [a]; ld.param.u64 %d1, [b]; ld.param.u64 %d2, [c];\n"
    "cvta.to.global.u64 %d0, %d0; cvta.to.global.u64 %d1, %d1; cvta.to.global.u64 %d2, %d2;\n"
    "mov.u32 %r0, %ctaid.x; mov.u32 %r1, %ntid.x; mov.u32 %r2, %tid.x;\n"
    "mad.lo.u32 %r3, %r0, %r1, %r2; mul.wide.u32 %d3, %r3, 16;\n"
    "add.u64 %d4, %d0, %d3; add.u64 %d5, %d1, %d3; add.u64 %d6, %d2, %d3;\n"
    "mov.f32 %f8, 0f40400000;\n"
    "ld.global.v4.f32 {%f0, %f1, %f2, %f3}, [%d4];\n"
    "ld.global.v4.f32 {%f4, %f5, %f6, %f7}, [%d5];\n"
    "fma.rn.f32 %f0, %f4, %f8, %f0; fma.rn.f32 %f1, %f5, %f8, %f1;\n"
    "fma.rn.f32 %f2, %f6, %f8, %f2; fma.rn.f32 %f3, %f7, %f8, %f3;\n"
    "st.global.v4.f32 [%d6], {%f0, %f1, %f2, %f3};\nret;\n}\n";

static void device_triad(Pointer a, Pointer b) {
  Module module;
  Function triad;
  Pointer c;
  float last_a = 2.0f, last_b = 5.0f, last_c = 0.0f;
  Result result = module_load(&module, TRIAD);
  if (result) {
    printf("# no device_triad: the driver does not compile PTX here (error %d)\n", result);
    return;
  }
  ok(module_function(&triad, module, "triad"), "kernel");
  ok(gpu_alloc(&c, GIB), "GPU memory");
  for (size_t bytes = MIB; bytes <= GIB; bytes *= 4) {
    Times times = {0};
    void *arguments[] = {&a, &b, &c};
    ok(copy_h2d(a + bytes - 4, &last_a, 4), "a");
    ok(copy_h2d(b + bytes - 4, &last_b, 4), "b");
    for (int round = 0; round <= 21; round++) {
      double start = now_us();
      ok(launch(triad, bytes / 4096, 1, 1, 256, 1, 1, 0, NULL, arguments, NULL), "launch");
      ok(synchronize(), "wait");
      add(&times, round, now_us() - start);
    }
    ok(copy_d2h(&last_c, c + bytes - 4, 4), "c");
    check(last_c == 17.0f, "device triad");
    print_line("device_triad", 3 * bytes, 1, &times);
  }
  ok(gpu_free(c), "GPU memory back");
}

/* ---- Several GPUs ---- */

static void peer_copies(Device *devices, Context *contexts) {
  int able = 0;
  Pointer from, to;
  ok(can_access(&able, devices[0], devices[1]), "peer");
  printf("# GPU 0 reaches the memory of GPU 1 directly: %s\n", able ? "yes" : "no");
  ok(context_set(contexts[1]), "context");
  ok(gpu_alloc(&to, 2 * GIB), "GPU memory");
  if (able) ok(enable_peer(contexts[0], 0), "peer access");
  ok(context_set(contexts[0]), "context");
  ok(gpu_alloc(&from, 2 * GIB), "GPU memory");
  if (able) ok(enable_peer(contexts[1], 0), "peer access");
  ok(fill_d8(from, 0x37, 2 * GIB), "fill");
  for (size_t bytes = 64 * KIB; bytes <= GIB; bytes *= 2) {
    Times times = {0};
    for (int round = 0; round <= rounds_of(bytes); round++) {
      size_t at = walk(round, bytes, 2 * GIB);
      double start = now_us();
      ok(copy_peer(to + at, contexts[1], from + at, contexts[0], bytes, NULL), "peer copy");
      ok(synchronize(), "wait");
      add(&times, round, now_us() - start);
    }
    print_line("peer_copy", bytes, 1, &times);
  }
  unsigned char last;
  ok(copy_d2h(&last, to + 2 * GIB - 1, 1), "check");
  check(last == 0x37, "peer copy");
  ok(gpu_free(from), "GPU memory back");
  ok(context_set(contexts[1]), "context");
  ok(gpu_free(to), "GPU memory back");
}

static int load_collectives(void) {
  void *library = dlopen("libnccl.so.2", RTLD_NOW);
  if (!library) return 0;
#define LOAD_OR_LEAVE(name, symbol, args)                                                          \
  *(void **)&name = dlsym(library, symbol);                                                        \
  if (!name) return 0;
  COLLECTIVES(LOAD_OR_LEAVE)
  return 1;
}

/* One collective on every GPU: shards of `shard` bytes; all numbers are fp16 (NCCL's 6), sum 0. */
static void collective(int which, int gpus, void **comms, Pointer *whole, Pointer *part,
                       size_t shard) {
  ok(nccl_start(), "group");
  for (int i = 0; i < gpus; i++) {
    void *all = (void *)whole[i], *one = (void *)part[i];
    Result result = which == 0   ? nccl_gather(one, all, shard / 2, 6, comms[i], NULL)
                    : which == 1 ? nccl_scatter(all, one, shard / 2, 6, 0, comms[i], NULL)
                                 : nccl_broadcast(one, all, shard / 2, 6, 0, comms[i], NULL);
    ok(result, "collective");
  }
  ok(nccl_end(), "group end");
}

static void collectives(int gpus, Context *contexts) {
  const char *names[] = {"all_gather", "reduce_scatter", "broadcast"};
  Pointer whole[MAX_GPUS], part[MAX_GPUS];
  void *comms[MAX_GPUS];
  int version = 0;
  /* Multicast over NVLink is left alone: not every virtual machine may use it. */
  setenv("NCCL_NVLS_ENABLE", "0", 1);
  if (!load_collectives()) {
    printf("# no collectives: libnccl.so.2 does not load\n");
    return;
  }
  for (int i = 0; i < gpus; i++) {
    ok(context_set(contexts[i]), "context");
    ok(gpu_alloc(&part[i], GIB), "GPU memory");
    ok(gpu_alloc(&whole[i], gpus * GIB), "GPU memory");
    ok(fill_d8(part[i], 0x11, GIB), "fill");
    ok(fill_d8(whole[i], 0, gpus * GIB), "fill");
  }
  ok(nccl_version(&version), "version");
  printf("# NCCL %d, one process, %d GPUs, fp16\n", version, gpus);
  ok(nccl_init(comms, gpus, NULL), "communicators");
  for (int which = 0; which < 3; which++) {
    for (size_t shard = KIB; shard <= GIB; shard *= 4) {
      Times times = {0};
      for (int round = 0; round <= 15; round++) {
        double start = now_us();
        collective(which, gpus, comms, whole, part, shard);
        for (int i = 0; i < gpus; i++) {
          ok(context_set(contexts[i]), "context");
          ok(synchronize(), "wait");
        }
        add(&times, round, now_us() - start);
      }
      print_line(names[which], which == 2 ? shard : shard * (gpus - 1), 1, &times);
    }
    if (which == 0) {
      unsigned char last;
      ok(copy_d2h(&last, whole[gpus - 1] + GIB - 1, 1), "check");
      check(last == 0x11, "all-gather");
    }
  }
}

/* ---- What ran where ---- */

static void print_matching(const char *path, const char *start) {
  char line[512];
  FILE *file = fopen(path, "r");
  if (!file) return;
  while (fgets(line, sizeof line, file))
    if (!strncmp(line, start, strlen(start))) {
      for (char *c = line; *c; c++)
        if (*c == '\t') *c = ' ';
      /* Who built a driver is of no interest. */
      line[strcspn(line, "(\n")] = 0;
      printf("# %s\n", line);
      break;
    }
  fclose(file);
}

static void print_machine(const char *gpu, int gpus, int cores) {
  int version = 0;
  ok(driver_version(&version), "version");
  printf("# %d x %s, driver API %d, %d cores\n", gpus, gpu, version, cores);
  print_matching("/proc/driver/nvidia/version", "NVRM");
  print_matching("/proc/cpuinfo", "cpu family");
  print_matching("/proc/cpuinfo", "model\t");
  print_matching("/proc/meminfo", "MemTotal");
  print_matching("/sys/kernel/mm/transparent_hugepage/enabled", "");
  print_matching("/sys/devices/system/node/online", "");
  printf("measure,bytes,threads,rounds,first_us,median_us,min_us,max_us\n");
}

static void one_gpu(int cores) {
  const size_t span = 2 * GIB;
  Pointer one, two;
  void *pinned;
  for (size_t bytes = 4 * GIB; bytes >= MIB; bytes /= 4) touch_pages("touch", bytes, MADV_NORMAL);
  for (size_t bytes = GIB; bytes >= MIB; bytes /= 4) {
    touch_pages("touch_small", bytes, MADV_NOHUGEPAGE);
    touch_pages("touch_huge", bytes, MADV_HUGEPAGE);
  }
  pinned_allocations();
  gpu_allocations();
  ok(gpu_alloc(&one, span), "GPU memory");
  ok(gpu_alloc(&two, span), "GPU memory");
  ok(host_alloc(&pinned, span), "pinned memory");
  memset(pinned, 1, span);
  host_copies(pinned, one, span, "pinned_h2d", "pinned_d2h");
  ok(host_free(pinned), "pinned memory back");
  void *pageable = map(span, MADV_NORMAL);
  memset(pageable, 1, span);
  host_copies(pageable, one, span, "pageable_h2d", "pageable_d2h");
  munmap(pageable, span);
  fresh_copies(one, span);
  device_copies(one, two, span);
  device_triad(one, two);
  ok(gpu_free(one), "GPU memory back");
  ok(gpu_free(two), "GPU memory back");
  host_loops(cores, 256 * MIB);
}

int main(int count, char **arguments) {
  Device devices[MAX_GPUS];
  Context contexts[MAX_GPUS];
  char name[128];
  int gpus = 0, cores = (int)sysconf(_SC_NPROCESSORS_ONLN);
  void *library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!library) {
    fprintf(stderr, "no libcuda.so.1\n");
    return 1;
  }
#define LOAD(name, symbol, args)                                                                   \
  *(void **)&name = dlsym(library, symbol);                                                        \
  if (!name) {                                                                                     \
    fprintf(stderr, "no %s\n", symbol);                                                            \
    return 1;                                                                                      \
  }
  DRIVER(LOAD)
  ok(init(0), "cuInit");
  ok(device_count(&gpus), "GPUs");
  if (gpus > MAX_GPUS) gpus = MAX_GPUS;
  if (cores > MAX_THREADS) cores = MAX_THREADS;
  for (int i = 0; i < gpus; i++) {
    ok(device_get(&devices[i], i), "GPU");
    ok(context_retain(&contexts[i], devices[i]), "context");
  }
  ok(device_name(name, sizeof name, devices[0]), "name");
  ok(context_set(contexts[0]), "context");
  print_machine(name, gpus, cores);
  if (count < 2 || strcmp(arguments[1], "peer")) one_gpu(cores);
  if (gpus < 2) {
    printf("# one GPU: no peer_copy, no collectives\n");
    return 0;
  }
  peer_copies(devices, contexts);
  collectives(gpus, contexts);
  return 0;
}
