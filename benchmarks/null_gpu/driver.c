/* libcuda.so.1 and libnvidia-ml.so.1 for runtime.c: what Triton, PyTorch and this package ask the driver itself.

   A kernel is launched by `on_launch`, if somebody has set it (launches.py); without, nothing is. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Launch(const char *code, const char *name, const unsigned grid[3], unsigned threads, unsigned shared, void **parameters);
typedef struct { const char *code, *name; } Function;
typedef struct { unsigned grid[3], block[3], shared; } Config; /* how CUlaunchConfig begins */
enum { LAUNCH_FAILED = 719 };
static Launch *on_launch;
void null_launch_with(Launch *f) { on_launch = f; }

extern char null_message[];
extern void null_say(const char *);
extern int null_started, null_reachable(void *), cudaDeviceGetAttribute(int *, int, int), cudaDriverGetVersion(int *), cudaStreamIsCapturing(void *, int *);
static int context;

int cuInit(unsigned flags) { return null_started = 1, 0; }
int cuDriverGetVersion(int *v) { return cudaDriverGetVersion(v); }
int cuDeviceGetCount(int *n) { return null_started ? (*n = 1, 0) : 3; /* CUDA_ERROR_NOT_INITIALIZED */ }
int cuDeviceGet(int *d, int i) { return *d = 0, 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { return cudaDeviceGetAttribute(v, a, d); /* the same numbers */ }
int cuDevicePrimaryCtxRetain(void **c, int d) { return *c = &context, 0; }
int cuDevicePrimaryCtxGetState(int d, unsigned *flags, int *active) { return *active = 1, 0; }
int cuCtxGetCurrent(void **c) { return *c = &context, 0; }
int cuCtxGetDevice(int *d) { return *d = 0, 0; }
int cuStreamIsCapturing(void *s, int *status) { return cudaStreamIsCapturing(s, status); }
int cuCtxGetLimit(size_t *v, int limit) { return *v = 1 << 20, 0; }
int cuGetErrorString(int e, const char **s) { return *s = e == LAUNCH_FAILED ? null_message : "null GPU", 0; }
int cuGetErrorName(int e, const char **s) { return *s = "null GPU", 0; }

/* What is loaded is machine code, of which nothing is kept, or PTX, which is text. */
int cuModuleLoadData(void **m, const void *image) { return *m = memcmp(image, "\x7f" "ELF", 4) ? strdup(image) : strdup(""), 0; }
int cuModuleLoadDataEx(void **m, const void *image) { return cuModuleLoadData(m, image); }
int cuModuleLoad(void **m, const char *file) {
  FILE *f = fopen(file, "rb");
  if (!f) return 301; /* CUDA_ERROR_FILE_NOT_FOUND */
  fseek(f, 0, SEEK_END);
  size_t size = ftell(f);
  char *image = calloc(1, size + 5);
  rewind(f);
  size = fread(image, 1, size, f);
  fclose(f);
  cuModuleLoadData(m, image);
  return free(image), 0;
}
int cuModuleGetFunction(void **f, void *m, const char *name) {
  Function *made = calloc(1, sizeof *made);
  *made = (Function){m, strdup(name)};
  return *f = made, 0;
}
static int launch(Function *f, const unsigned grid[3], unsigned threads, unsigned shared, void **parameters) {
  if (!on_launch) return 0;
  if (*f->code) return on_launch(f->code, f->name, grid, threads, shared, parameters);
  null_say("machine code cannot be executed here, only Triton's PTX");
  return LAUNCH_FAILED;
}
int cuLaunchKernelEx(const Config *c, Function *f, void **parameters) {
  return launch(f, c->grid, c->block[0] * c->block[1] * c->block[2], c->shared, parameters);
}
int cuLaunchKernel(Function *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream, void **parameters) {
  return launch(f, (unsigned[]){gx, gy, gz}, bx * by * bz, shared, parameters);
}
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
/* PyTorch asks for these when memory has run out: whose it is. */
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **d) { return *d = &context, 0; }
int nvmlDeviceGetComputeRunningProcesses(void *d, unsigned *n, void *found) { return *n = 0, 0; }
