/* What CUDA's virtual memory calls cost on ranges made of several pieces.
 *
 * Prints CSV: median microseconds of R rounds, for a range of `total` MiB made of pieces of `piece` MiB:
 *   access_each    cuMemSetAccess, one call a piece, sum
 *   access_range   cuMemSetAccess, one call for the whole range
 *   unmap_each / unmap_range   cuMemUnmap likewise
 *   access_second  one call for a second range of addresses of the same pieces
 *   create, map, reserve, release, address_free  sums over the pieces
 * Build and run: cc -O2 range_costs.c -ldl -o range_costs && ./range_costs > range_costs.csv
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
typedef int CUresult; typedef int CUdevice; typedef void *CUcontext; typedef unsigned long long CUdeviceptr, Handle;
typedef struct { int type; int id; } Location;
typedef struct { int type; int requestedHandleTypes; Location location; void *win32; struct { unsigned char c; unsigned char g; unsigned short u; unsigned char r[4]; } flags; } Prop;
typedef struct { Location location; int flags; } Access;
#define ROUNDS 15
#define F(ret, name, args) static ret (*name) args
F(CUresult, cuInit, (unsigned)); F(CUresult, cuDeviceGet, (CUdevice *, int)); F(CUresult, cuDevicePrimaryCtxRetain, (CUcontext *, CUdevice));
F(CUresult, cuCtxSetCurrent, (CUcontext)); F(CUresult, cuCtxSynchronize, (void)); F(CUresult, cuDriverGetVersion, (int *)); F(CUresult, cuDeviceGetName, (char *, int, CUdevice));
F(CUresult, cuMemAddressReserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long));
F(CUresult, cuMemAddressFree, (CUdeviceptr, size_t)); F(CUresult, cuMemCreate, (Handle *, size_t, const Prop *, unsigned long long));
F(CUresult, cuMemRelease, (Handle)); F(CUresult, cuMemMap, (CUdeviceptr, size_t, size_t, Handle, unsigned long long));
F(CUresult, cuMemUnmap, (CUdeviceptr, size_t)); F(CUresult, cuMemSetAccess, (CUdeviceptr, size_t, const Access *, size_t));
F(CUresult, cuMemsetD8, (CUdeviceptr, unsigned char, size_t));
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e6 + t.tv_nsec * 1e-3; }
static void ok(CUresult r, const char *what) { if (r) { fprintf(stderr, "%s: error %d\n", what, r); exit(1); } }
static int cmp(const void *a, const void *b) { double x = *(double *)a, y = *(double *)b; return (x > y) - (x < y); }
static double median(double *v) { qsort(v, ROUNDS, sizeof *v, cmp); return v[ROUNDS / 2]; }
int main(void) {
  void *lib = dlopen("libcuda.so.1", RTLD_NOW); if (!lib) { fprintf(stderr, "no libcuda.so.1\n"); return 1; }
#define L(n, s) *(void **)&n = dlsym(lib, s); if (!n) { fprintf(stderr, "no %s\n", s); return 1; }
  L(cuInit, "cuInit") L(cuDeviceGet, "cuDeviceGet") L(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain") L(cuCtxSetCurrent, "cuCtxSetCurrent")
  L(cuCtxSynchronize, "cuCtxSynchronize") L(cuDriverGetVersion, "cuDriverGetVersion") L(cuDeviceGetName, "cuDeviceGetName")
  L(cuMemAddressReserve, "cuMemAddressReserve") L(cuMemAddressFree, "cuMemAddressFree") L(cuMemCreate, "cuMemCreate") L(cuMemRelease, "cuMemRelease")
  L(cuMemMap, "cuMemMap") L(cuMemUnmap, "cuMemUnmap") L(cuMemSetAccess, "cuMemSetAccess") L(cuMemsetD8, "cuMemsetD8_v2")
  ok(cuInit(0), "cuInit"); CUdevice dev; ok(cuDeviceGet(&dev, 0), "device"); CUcontext ctx; ok(cuDevicePrimaryCtxRetain(&ctx, dev), "context"); ok(cuCtxSetCurrent(ctx), "current");
  char name[128]; int version; cuDeviceGetName(name, 128, dev); cuDriverGetVersion(&version); printf("# %s, driver API %d, %d rounds, medians in microseconds\n", name, version, ROUNDS);
  printf("total_mib,piece_mib,pieces,reserve,create,map,access_each,unmap_each,map_again,access_range,unmap_range,access_second,unmap_second,release,address_free\n");
  Prop prop; memset(&prop, 0, sizeof prop); prop.type = 1; prop.location.type = 1; prop.location.id = 0;
  Access access; memset(&access, 0, sizeof access); access.location.type = 1; access.flags = 3;
  int totals[] = {2, 8, 32, 64, 128, 512, 1024, 2048};
  for (unsigned ti = 0; ti < sizeof totals / sizeof *totals; ti++) for (int piece = 2; piece <= totals[ti]; piece *= 4) {
    size_t total = (size_t)totals[ti] << 20, size = (size_t)piece << 20, n = total / size;
    if (totals[ti] % piece) continue;
    static double t[13][ROUNDS]; Handle *h = malloc(n * sizeof *h);
    for (int r = -2; r < ROUNDS; r++) {
      double v[13]; CUdeviceptr a, b; double s = now();
#define T(i) { v[i] = now() - s; s = now(); }
      ok(cuMemAddressReserve(&a, total, 0, 0, 0), "reserve"); T(0)
      for (size_t i = 0; i < n; i++) ok(cuMemCreate(&h[i], size, &prop, 0), "create"); T(1)
      for (size_t i = 0; i < n; i++) ok(cuMemMap(a + i * size, size, 0, h[i], 0), "map"); T(2)
      for (size_t i = 0; i < n; i++) ok(cuMemSetAccess(a + i * size, size, &access, 1), "access"); T(3)
      ok(cuMemsetD8(a, 1, total), "memset"); ok(cuCtxSynchronize(), "sync"); s = now();
      for (size_t i = 0; i < n; i++) ok(cuMemUnmap(a + i * size, size), "unmap"); T(4)
      for (size_t i = 0; i < n; i++) ok(cuMemMap(a + i * size, size, 0, h[i], 0), "map"); T(5)
      ok(cuMemSetAccess(a, total, &access, 1), "access"); T(6)
      ok(cuMemsetD8(a, 2, total), "memset"); ok(cuCtxSynchronize(), "sync"); s = now();
      ok(cuMemAddressReserve(&b, total, 0, 0, 0), "reserve");
      for (size_t i = 0; i < n; i++) ok(cuMemMap(b + i * size, size, 0, h[i], 0), "map again"); s = now();
      ok(cuMemSetAccess(b, total, &access, 1), "access second"); T(8)
      ok(cuMemsetD8(b, 3, total), "memset second"); ok(cuCtxSynchronize(), "sync"); s = now();
      ok(cuMemUnmap(b, total), "unmap second"); T(9)
      ok(cuMemAddressFree(b, total), "free second"); s = now();
      ok(cuMemUnmap(a, total), "unmap range"); T(7)
      for (size_t i = 0; i < n; i++) ok(cuMemRelease(h[i]), "release"); T(10)
      ok(cuMemAddressFree(a, total), "address free"); T(11)
      if (r >= 0) for (int i = 0; i < 12; i++) t[i][r] = v[i];
    }
    free(h);
    printf("%d,%d,%zu", totals[ti], piece, n); for (int i = 0; i < 12; i++) printf(",%.2f", median(t[i])); printf("\n"); fflush(stdout);
  }
  return 0;
}
