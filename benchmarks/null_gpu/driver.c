/* libcuda.so.1 and libnvidia-ml.so.1 for runtime.c: what Triton, PyTorch and this package ask the driver itself. */
#include <stdlib.h>

extern int null_started, null_reachable(void *), cudaDeviceGetAttribute(int *, int, int);
static int context;

int cuInit(unsigned flags) { return null_started = 1, 0; }
int cuDeviceGetCount(int *n) { return null_started ? (*n = 1, 0) : 3; /* CUDA_ERROR_NOT_INITIALIZED */ }
int cuDeviceGet(int *d, int i) { return *d = 0, 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { return cudaDeviceGetAttribute(v, a, d); /* the same numbers */ }
int cuDevicePrimaryCtxRetain(void **c, int d) { return *c = &context, 0; }
int cuDevicePrimaryCtxGetState(int d, unsigned *flags, int *active) { return *active = 1, 0; }
int cuCtxGetCurrent(void **c) { return *c = &context, 0; }
int cuCtxGetLimit(size_t *v, int limit) { return *v = 1 << 20, 0; }
int cuGetErrorString(int e, const char **s) { return *s = "null GPU", 0; }
int cuGetErrorName(int e, const char **s) { return *s = "null GPU", 0; }
int cuModuleLoad(void **m, const char *file) { return *m = calloc(1, 64), 0; }
int cuModuleLoadData(void **m, const void *image) { return *m = calloc(1, 64), 0; }
int cuModuleLoadDataEx(void **m, const void *image) { return *m = calloc(1, 64), 0; }
int cuModuleGetFunction(void **f, void *m, const char *name) { return *f = calloc(1, 64), 0; }
int cuFuncGetAttribute(int *v, int a, void *f) { return *v = a == 4 ? 64 : a == 0 ? 1024 : 0, 0; /* registers, threads */ }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n) { return *n = 2, 0; }
int cuOccupancyMaxActiveClusters(int *n) { return *n = 66, 0; }
int cuPointerGetAttribute(void *v, int a, void *p) {
  if (!null_reachable(p)) return 1; /* CUDA_ERROR_INVALID_VALUE: a tensor of the host's given to a kernel */
  return *(void **)v = p, 0;
}

int nvmlInit(void) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(int *n) { return *n = 1, 0; }
const char *nvmlErrorString(int e) { return "null GPU"; }
