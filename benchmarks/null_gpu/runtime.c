/* A CUDA runtime without a GPU: memory is the host's, copies are done at once, and kernels do nothing.

   Preloaded before libcudart and libcublas (see __main__.py, which adds a function that returns 0 for whatever PyTorch
   calls and is not here). What a program decides by, sizes, properties and errors, is an H100's, but for the compute
   capability and the memory, which NULL_GPU_CAPABILITY (as 86) and NULL_GPU_MEMORY (GiB) name. */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>

#define OK cudaSuccess
#define PAGE 4096ull
#define SPAN (1ull << 43)              /* addresses of each kind of memory; none is used twice */
#define UNREAD ((size_t)1 << 16)       /* larger copies on the device are left out unless NULL_GPU=compute */

typedef struct { char *start, *next; } Area;
static Area device_memory, pinned_memory;
static size_t in_use;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
int null_started; /* whether the runtime was initialised: the driver says so (driver.c) */

static size_t named(const char *variable, size_t otherwise) {
  const char *value = getenv(variable);
  return value ? strtoull(value, 0, 10) : otherwise;
}
static size_t capacity(void) { return named("NULL_GPU_MEMORY", 80) << 30; }
static int capability(void) { return named("NULL_GPU_CAPABILITY", 90); }
static int inside(const Area *area, const void *p) {
  return area->start && (const char *)p >= area->start && (const char *)p < area->start + SPAN;
}
int null_reachable(void *p) { return inside(&device_memory, p) || inside(&pinned_memory, p); }
static int compute(void) {
  const char *mode = getenv("NULL_GPU");
  return mode && !strcmp(mode, "compute");
}

/* Blocks of the device, in order of their addresses; `live` is set to 0 when one is freed. */
typedef struct { char *start; size_t bytes; int live; } Block;
static Block *blocks;
static size_t count, room;

static Block *block_of(const char *p) {
  size_t low = 0, high = count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (blocks[middle].start <= p) low = middle + 1;
    else high = middle;
  }
  return low ? &blocks[low - 1] : 0;
}
/* Of each of n addresses, whether the bytes from there on are all in one block that has been allocated and not freed. */
void null_allocated(char *const *addresses, long n, size_t bytes, unsigned char *found) {
  pthread_mutex_lock(&lock);
  for (Block *b = 0; n--; addresses++, found++) {
    if (!b || *addresses < b->start || *addresses >= b->start + b->bytes) b = block_of(*addresses);
    *found = b && b->live && *addresses + bytes <= b->start + b->bytes;
  }
  pthread_mutex_unlock(&lock);
}
char *null_memory(void) { return device_memory.start; }
size_t null_span(void) { return SPAN; }

/* The page before each block holds its size. */
static size_t *size_of(void *p) { return (size_t *)((char *)p - PAGE); }
static void *take(Area *area, size_t wanted) {
  size_t bytes = (wanted + PAGE - 1) / PAGE * PAGE;
  pthread_mutex_lock(&lock);
  if (!area->start) {
    area->start = mmap(0, SPAN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    area->next = area->start;
  }
  char *p = area->next + PAGE;
  area->next = p + bytes;
  if (area == &device_memory) {
    if (count == room) blocks = realloc(blocks, (room = 2 * room + 1024) * sizeof *blocks);
    blocks[count++] = (Block){p, wanted, 1};
  }
  pthread_mutex_unlock(&lock);
  *size_of(p) = bytes;
  return p;
}
static void give(void *p) {
  pthread_mutex_lock(&lock);
  Block *b = block_of(p);
  if (b && b->start == p) b->live = 0;
  pthread_mutex_unlock(&lock);
  madvise(p, *size_of(p), MADV_DONTNEED);
}

cudaError_t cudaMalloc(void **p, size_t n) {
  null_started = 1;
  *p = 0;
  if (in_use + n > capacity()) return cudaErrorMemoryAllocation;
  *p = take(&device_memory, n);
  __atomic_add_fetch(&in_use, *size_of(*p), __ATOMIC_RELAXED);
  return OK;
}
cudaError_t cudaFree(void *p) {
  if (p) __atomic_sub_fetch(&in_use, *size_of(p), __ATOMIC_RELAXED), give(p);
  return OK;
}
cudaError_t cudaMallocAsync(void **p, size_t n, cudaStream_t s) { return cudaMalloc(p, n); }
cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { return cudaFree(p); }
cudaError_t cudaGetSymbolAddress(void **p, const void *symbol) { return cudaMalloc(p, PAGE); }
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned flags) { return *p = take(&pinned_memory, n), OK; }
cudaError_t cudaFreeHost(void *p) { return p ? give(p) : (void)0, OK; }
cudaError_t cudaMemGetInfo(size_t *free, size_t *total) { return *total = capacity(), *free = *total - in_use, OK; }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  int device = inside(&device_memory, p), pinned = inside(&pinned_memory, p);
  *a = (struct cudaPointerAttributes){.device = device || pinned ? 0 : -1};
  a->type = device ? cudaMemoryTypeDevice : pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  a->devicePointer = device || pinned ? (void *)p : 0;
  a->hostPointer = device ? 0 : (void *)p;
  return OK;
}

static cudaError_t copy(void *to, const void *from, size_t n) {
  int on_device = inside(&device_memory, to) && inside(&device_memory, from);
  if (n <= UNREAD || !on_device || compute()) memmove(to, from, n);
  return OK;
}
cudaError_t cudaMemcpy(void *d, const void *s, size_t n, enum cudaMemcpyKind k) { return copy(d, s, n); }
cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, enum cudaMemcpyKind k, cudaStream_t q) { return copy(d, s, n); }
cudaError_t cudaMemcpyPeerAsync(void *d, int a, const void *s, int b, size_t n, cudaStream_t q) { return copy(d, s, n); }
cudaError_t cudaMemcpy2DAsync(void *d, size_t dp, const void *s, size_t sp, size_t width, size_t height, enum cudaMemcpyKind k, cudaStream_t q) {
  for (size_t i = 0; i < height; i++) memmove((char *)d + i * dp, (const char *)s + i * sp, width);
  return OK;
}
cudaError_t cudaMemset(void *p, int value, size_t n) {
  if (n <= UNREAD || compute()) memset(p, value, n);
  return OK;
}
cudaError_t cudaMemsetAsync(void *p, int value, size_t n, cudaStream_t s) { return cudaMemset(p, value, n); }

/* --- the device ---------------------------------------------------------------------------------------------------- */

cudaError_t cudaGetDeviceCount(int *n) { return null_started = 1, *n = 1, OK; }
cudaError_t cudaGetDevice(int *d) { return *d = 0, OK; }
cudaError_t cudaSetDevice(int d) { return d == 0 ? OK : cudaErrorInvalidDevice; }
cudaError_t cudaDriverGetVersion(int *v) { return *v = CUDART_VERSION, OK; }
cudaError_t cudaRuntimeGetVersion(int *v) { return *v = CUDART_VERSION, OK; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most) { return *least = 0, *most = -5, OK; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { return *can = 0, OK; }
cudaError_t cudaDeviceGetPCIBusId(char *s, int n, int d) { return snprintf(s, n, "0000:00:00.0"), OK; }
cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) {
  switch (a) {
    case cudaDevAttrComputeCapabilityMajor: *v = capability() / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *v = capability() % 10; break;
    case cudaDevAttrMultiProcessorCount: *v = 132; break;
    case cudaDevAttrWarpSize: *v = 32; break;
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: *v = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *v = 2048; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *v = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = 232448; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *v = 233472; break;
    case cudaDevAttrMaxRegistersPerBlock: *v = 65536; break;
    case cudaDevAttrMaxGridDimX: *v = 2147483647; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *v = 65535; break;
    case cudaDevAttrClockRate: *v = 1980000; break;
    case cudaDevAttrMemoryClockRate: *v = 2619000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *v = 5120; break;
    default: *v = 1;
  }
  return OK;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  *p = (struct cudaDeviceProp){
      .major = capability() / 10, .minor = capability() % 10, .multiProcessorCount = 132, .totalGlobalMem = capacity(),
      .warpSize = 32, .maxThreadsPerBlock = 1024, .maxThreadsPerMultiProcessor = 2048,
      .maxBlocksPerMultiProcessor = 32, .sharedMemPerBlock = 49152, .sharedMemPerBlockOptin = 232448,
      .sharedMemPerMultiprocessor = 233472, .regsPerBlock = 65536, .regsPerMultiprocessor = 65536,
      .l2CacheSize = 50 << 20, .maxThreadsDim = {1024, 1024, 64}, .maxGridSize = {2147483647, 65535, 65535},
      .canMapHostMemory = 1, .unifiedAddressing = 1, .concurrentKernels = 1, .asyncEngineCount = 3,
      .cooperativeLaunch = 1, .memoryBusWidth = 5120};
  snprintf(p->name, sizeof p->name, "null GPU (sm_%d)", capability());
  return OK;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  *a = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 32, .ptxVersion = 90, .binaryVersion = 90,
                                   .maxDynamicSharedSizeBytes = 232448};
  return OK;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int b, size_t s) { return *n = 2, OK; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t s, unsigned x) { return *n = 2, OK; }
char null_message[800]; /* what was wrong with the kernel that failed last */
void null_say(const char *text) { strncpy(null_message, text, sizeof null_message - 1); }
const char *cudaGetErrorString(cudaError_t e) {
  return e == cudaErrorMemoryAllocation ? "out of memory" : e == cudaErrorLaunchFailure ? null_message : "null GPU";
}
const char *cudaGetErrorName(cudaError_t e) { return "null GPU"; }
static int nothing(void) { return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned v, unsigned long long flags, enum cudaDriverEntryPointQueryResult *found) {
  *f = (void *)nothing;
  if (found) *found = cudaDriverEntryPointSuccess;
  return OK;
}

/* --- streams, events, graphs --------------------------------------------------------------------------------------- */

static void *handle(void) { return calloc(1, 64); }
static int capturing;
static unsigned long long capture; /* the number of the last one, with which its graphs begin */
static int (*on_replay)(unsigned long long);
void null_replay_with(int (*f)(unsigned long long)) { on_replay = f; }
unsigned long long null_capture(void) { return capturing ? capture : 0; }
static enum cudaStreamCaptureStatus status(void) { return capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone; }
cudaError_t cudaStreamCreate(cudaStream_t *s) { return *s = handle(), OK; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) { return *s = handle(), OK; }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) { return *priority = 0, OK; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *c) { return *c = status(), OK; }

/* What is captured must not be computed yet. Operators compute to know what they return, so the memory is put back. One
 * graph may go on where the last one ended, as a backward pass does: for it, that one is computed, if it was not yet. */
static char **before;
static size_t blocks_before;
static unsigned long long not_replayed;
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode m) {
  if (compute()) {
    before = calloc(count + 1, sizeof *before);
    blocks_before = count;
    for (size_t i = 0; i < count; i++)
      if (blocks[i].live) before[i] = memcpy(malloc(blocks[i].bytes + 1), blocks[i].start, blocks[i].bytes);
    if (not_replayed && on_replay) on_replay(not_replayed);
  }
  return capturing = 1, capture++, OK;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g) {
  *(unsigned long long *)(*g = handle()) = capture;
  for (size_t i = 0; i < blocks_before; i++) {
    if (before[i] && blocks[i].live) memcpy(blocks[i].start, before[i], blocks[i].bytes);
    free(before[i]);
  }
  free(before), before = 0, blocks_before = 0;
  not_replayed = capture;
  return capturing = 0, OK;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *c, unsigned long long *id, cudaGraph_t *g, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *n) {
  *c = status();
  if (id) *id = capture;
  if (g) *g = 0;
  if (nodes) *nodes = 0;
  if (edges) *edges = 0;
  if (n) *n = 0;
  return OK;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *nodes, size_t *n) { return *n = 1, OK; }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long f) {
  *(unsigned long long *)(*e = handle()) = *(unsigned long long *)g;
  return OK;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s) {
  not_replayed = 0;
  return on_replay ? on_replay(*(unsigned long long *)e) : OK;
}
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void *data, unsigned flags) { return f(s, OK, data), OK; }
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *data) { return f(data), OK; }
cudaError_t cudaEventCreate(cudaEvent_t *e) { return *e = handle(), OK; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { return *e = handle(), OK; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return clock_gettime(CLOCK_MONOTONIC, (struct timespec *)e), OK; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) { return cudaEventRecord(e, s); }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
  struct timespec *from = (void *)a, *to = (void *)b;
  *ms = (to->tv_sec - from->tv_sec) * 1e3 + (to->tv_nsec - from->tv_nsec) * 1e-6;
  return OK;
}
void *__cudaRegisterFatBinary(void *binary) {
  static void *one;
  return &one;
}

/* --- cuBLAS -------------------------------------------------------------------------------------------------------- */

int cublasCreate_v2(void **h) { return *h = handle(), 0; }
int cublasGetMathMode(void *h, int *mode) { return *mode = 0, 0; }
int cublasGetPointerMode_v2(void *h, int *mode) { return *mode = 0, 0; }
int cublasLtMatmulDescCreate(void **d, int c, int t) { return *d = calloc(1, 256), 0; }
int cublasLtMatrixLayoutCreate(void **d, int t, unsigned long r, unsigned long c, long l) { return *d = calloc(1, 256), 0; }
int cublasLtMatmulPreferenceCreate(void **p) { return *p = calloc(1, 256), 0; }
int cublasLtMatmulAlgoGetHeuristic(void *l, void *d, void *a, void *b, void *c, void *e, void *p, int n, void *results, int *found) {
  memset(results, 0, 96); /* one cublasLtMatmulHeuristicResult_t: no workspace, success */
  return *found = 1, 0;
}

/* --- the driver's file, by which `composer_speedups.hardware` and others know that there is one --------------------- */

static const char *there(const char *path) { return strcmp(path, "/dev/nvidiactl") ? path : "/dev/null"; }
int stat(const char *restrict path, struct stat *restrict found) { return fstatat(AT_FDCWD, there(path), found, 0); }
int stat64(const char *restrict path, struct stat64 *restrict found) { return fstatat64(AT_FDCWD, there(path), found, 0); }
