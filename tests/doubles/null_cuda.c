/* CUDA without a device: the driver, its runtime, cuBLAS and cuBLASLt in one library, for ONNX Runtime's CUDA provider.
 *
 * Device memory is host memory, copies copy, and kernels do nothing, so results are worthless. What the caller does is
 * true: every event is a line of a log (kernels and products by name). Work of a stream that is captured is kept and
 * done by every launch of its graph; what CUDA forbids during a capture returns error 900 here, too.
 * Declarations are our own, after NVIDIA's documentation. Only what the provider and cuda-bindings call is here.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { SUCCESS = 0, INVALID = 1, NO_MEMORY = 2, ILLEGAL_STATE = 401, NOT_FOUND = 500, CAPTURE_UNSUPPORTED = 900 };
enum { HOST = 1, DEVICE = 2, GLOBAL = 0, VERSION = 13000, PROCESSORS = 132, SHARED = 227 * 1024, BUCKETS = 1 << 16 };

typedef struct { unsigned x, y, z; } Extent;
typedef struct Block { struct Block *next; char *start; size_t size; int kind; } Block;
typedef struct Work {
    struct Work *next;
    const char *name, *from;
    char *to;
    size_t pitch[2], width, height;
} Work;
typedef struct { Work *first, **last; } Graph;
typedef struct { Graph *captured; int broken; } Stream;
typedef struct Kernel { struct Kernel *next; const void *key; const char *name; } Kernel;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of the log, and of the list of blocks */
static char *text;
static size_t text_used, text_size, taken;
static Block *blocks;
static Kernel *kernels[BUCKETS];
static Stream default_stream;
static int failure; /* what every kernel and every wait returns from now on */

/* ---------------------------------------------------------------------------------------- what the tests read */

static void say(const char *format, ...) {
    va_list values;
    char line[4096];
    va_start(values, format);
    size_t size = (size_t)vsnprintf(line, sizeof line - 1, format, values);
    va_end(values);
    if (size > sizeof line - 2) size = sizeof line - 2;
    line[size++] = '\n';
    pthread_mutex_lock(&lock);
    if (text_used + size + 1 > text_size) text = realloc(text, text_size = 2 * (text_used + size + 1));
    memcpy(text + text_used, line, size);
    text[text_used += size] = 0;
    pthread_mutex_unlock(&lock);
}

const char *null_cuda_log(void) { return text ? text : ""; }

void null_cuda_clear(void) { if (text) text[text_used = 0] = 0; }
void null_cuda_fail(int code) { failure = code; }

static long setting(const char *name, long usual) { const char *set = getenv(name); return set ? atol(set) : usual; }
static int capability(void) { return (int)setting("NULL_CUDA_CAPABILITY", 90); }
static size_t memory(void) { return (size_t)setting("NULL_CUDA_MEMORY_MB", 80000) << 20; }

/* ---------------------------------------------------------------------------------------- streams and graphs */

static Stream *stream_of(void *stream) { return (uintptr_t)stream < 8 ? &default_stream : stream; }

/* Captures spoil, and are spoiled by, calls of their own thread, and in global mode of others in that mode. */
static __thread int thread_mode = GLOBAL;
static __thread Stream *own_capture;
static Stream *_Atomic global_capture;

int cuThreadExchangeStreamCaptureMode(int *mode) {
    int before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return SUCCESS;
}

static int forbidden(const char *doing) {
    Stream *on = own_capture ? own_capture : thread_mode == GLOBAL ? global_capture : NULL;
    if (!on) return SUCCESS;
    say("forbidden %s", doing);
    on->broken = 1;
    return CAPTURE_UNSUPPORTED;
}

static void perform(const char *when, const Work *work) {
    if (work->to && work->from)
        for (size_t row = 0; row < work->height; row++)
            memmove(work->to + row * work->pitch[0], work->from + row * work->pitch[1], work->width);
    else if (work->to)
        memset(work->to, (int)work->pitch[0], work->width);
    say("%s %s", when, work->name);
}

static int submit(void *stream, Work work) {
    Stream *on = stream_of(stream);
    if (!on->captured) {
        perform("do", &work);
        free((char *)work.name);
        return SUCCESS;
    }
    say("record %s", work.name);
    Work *kept = malloc(sizeof *kept);
    *kept = work;
    kept->next = NULL;
    *on->captured->last = kept;
    on->captured->last = &kept->next;
    return SUCCESS;
}

static Work named(const char *format, ...) {
    va_list values;
    Work work = {0};
    va_start(values, format);
    if (vasprintf((char **)&work.name, format, values) < 0) abort();
    va_end(values);
    return work;
}

int cudaStreamCreateWithFlags(void **stream, unsigned flags) {
    *stream = calloc(1, sizeof(Stream));
    say("stream %p flags %u", *stream, flags);
    return SUCCESS;
}

int cudaStreamCreate(void **stream) { return cudaStreamCreateWithFlags(stream, 0); }

int cudaStreamDestroy(void *stream) { free(stream); return SUCCESS; }

int cudaStreamSynchronize(void *stream) {
    say("synchronize %p", stream);
    return failure ? failure : forbidden("synchronize");
}

int cudaDeviceSynchronize(void) { say("synchronize device"); return forbidden("synchronize device"); }

int cudaStreamBeginCapture(void *stream, int mode) {
    Stream *on = stream_of(stream);
    say("begin_capture %p mode %d", stream, mode);
    Graph *graph = calloc(1, sizeof *graph);
    graph->last = &graph->first;
    *on = (Stream){graph, 0};
    own_capture = on;
    if (mode == GLOBAL) global_capture = on;
    return SUCCESS;
}

int cudaStreamEndCapture(void *stream, void **graph) {
    Stream *on = stream_of(stream);
    if (!on->captured) return *graph = NULL, ILLEGAL_STATE;
    *graph = on->broken ? NULL : on->captured;
    int code = on->broken ? CAPTURE_UNSUPPORTED + 1 : SUCCESS;
    *on = (Stream){0};
    if (global_capture == on) global_capture = NULL;
    own_capture = NULL;
    say("end_capture %p %p", stream, *graph);
    return code;
}

int cudaStreamIsCapturing(void *stream, int *status) { *status = stream_of(stream)->captured != NULL; return SUCCESS; }

int cudaGraphInstantiate(void **executable, void *graph, unsigned long long flags) {
    *executable = graph;
    return SUCCESS;
}

int cudaGraphLaunch(void *executable, void *stream) {
    say("launch_graph %p", executable);
    for (Work *work = ((Graph *)executable)->first; work; work = work->next) {
        if (stream_of(stream)->captured) return INVALID;
        perform("replay", work);
    }
    return SUCCESS;
}

int cudaGraphExecDestroy(void *executable) { say("destroy_graph %p", executable); return SUCCESS; }

int cudaLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
    if (stream_of(stream)->captured) return forbidden("host function");
    function(data);
    say("do host function");
    return SUCCESS;
}

/* Events are addresses of nothing; between any two of them lies a millisecond, for whoever times its candidates. */
int cudaEventCreateWithFlags(void **event, unsigned flags) { *event = malloc(8); return SUCCESS; }
int cudaEventCreate(void **event) { return cudaEventCreateWithFlags(event, 0); }
int cudaEventDestroy(void *event) { free(event); return SUCCESS; }
int cudaEventElapsedTime(float *ms, void *start, void *end) { *ms = 1; return SUCCESS; }
int cudaEventSynchronize(void *event) { say("synchronize event %p", event); return forbidden("synchronize event"); }

/* ---------------------------------------------------------------------------------------- memory */

/* HOST, DEVICE, or 0 for memory that was not taken here. */
static int kind_of(const void *address) {
    int kind = 0;
    pthread_mutex_lock(&lock);
    for (Block *block = blocks; block && !kind; block = block->next)
        if (block->start <= (char *)address && (char *)address < block->start + block->size) kind = block->kind;
    pthread_mutex_unlock(&lock);
    return kind;
}

static int take(const char *by, void **address, size_t size, int kind) {
    *address = NULL;
    say("%s %zu", by, size);
    int code = forbidden(by);
    if (code) return code;
    if (size == 0) return INVALID;
    if (kind == DEVICE && taken + size > memory()) return NO_MEMORY;
    char *start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return NO_MEMORY;
    Block *block = malloc(sizeof *block);
    pthread_mutex_lock(&lock);
    *block = (Block){blocks, start, size, kind};
    blocks = block;
    taken += kind == DEVICE ? size : 0;
    pthread_mutex_unlock(&lock);
    *address = start;
    return SUCCESS;
}

static int give_back(const char *by, void *address) {
    if (!address) return SUCCESS;
    int code = forbidden(by);
    if (code) return code;
    pthread_mutex_lock(&lock);
    Block **at = &blocks;
    while (*at && (*at)->start != address) at = &(*at)->next;
    Block *block = *at;
    if (block) *at = block->next, taken -= block->kind == DEVICE ? block->size : 0;
    pthread_mutex_unlock(&lock);
    if (!block) return INVALID;
    say("%s %zu", by, block->size);
    munmap(address, block->size);
    free(block);
    return SUCCESS;
}

#define TAKE(name, kind, ...) \
    int name(void **address, size_t size, ##__VA_ARGS__) { return take(#name, address, size, kind); }
#define GIVE_BACK(name, ...) int name(void *address, ##__VA_ARGS__) { return give_back(#name, address); }
TAKE(cudaMalloc, DEVICE) TAKE(cudaMallocHost, HOST) TAKE(cudaHostAlloc, HOST, unsigned flags)
TAKE(cudaMallocFromPoolAsync, DEVICE, void *pool, void *stream) TAKE(cuMemAlloc, DEVICE)
TAKE(cuMemHostAlloc, HOST, unsigned flags) GIVE_BACK(cudaFree) GIVE_BACK(cudaFreeHost)
GIVE_BACK(cudaFreeAsync, void *stream) GIVE_BACK(cuMemFree) GIVE_BACK(cuMemFreeHost)

int cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    *free_bytes = memory() - taken;
    *total = memory();
    return SUCCESS;
}

int cudaPointerGetAttributes(void **attributes, const void *address) {
    memset(attributes, 0, 88);
    *(int *)attributes = kind_of(address);
    attributes[1] = attributes[2] = (void *)address;
    return SUCCESS;
}

int cuMemHostGetDevicePointer(void **device, void *host, unsigned flags) { *device = host; return SUCCESS; }

static const char *name_of_kind(int kind) { return kind == DEVICE ? "device" : kind == HOST ? "pinned" : "pageable"; }

static int copy(const char *by, void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                size_t height, void *stream) {
    Work work = named("%s %s<-%s %zu", by, name_of_kind(kind_of(to)), name_of_kind(kind_of(from)), width * height);
    work.to = to, work.from = from, work.pitch[0] = to_pitch, work.pitch[1] = from_pitch;
    work.width = width, work.height = height;
    return submit(stream, work);
}

int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
    return copy("cudaMemcpyAsync", to, size, from, size, size, 1, stream);
}

int cudaMemcpy(void *to, const void *from, size_t size, int kind) {
    int code = forbidden("cudaMemcpy");
    return code ? code : copy("cudaMemcpy", to, size, from, size, size, 1, NULL);
}

int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                      int kind, void *stream) {
    return copy("cudaMemcpy2DAsync", to, to_pitch, from, from_pitch, width, height, stream);
}

int cuMemcpyAsync(void *to, const void *from, size_t size, void *stream) {
    return copy("cuMemcpyAsync", to, size, from, size, size, 1, stream);
}

/* CUDA_MEMCPY2D: per side x, y, type, host, device, array and pitch in 56 bytes; then width and height. */
int cuMemcpy2DAsync(const size_t *order, void *stream) {
    return copy("cuMemcpy2DAsync", (void *)order[11], order[13], (void *)order[4], order[6], order[14], order[15], stream);
}

int cudaMemsetAsync(void *to, int value, size_t size, void *stream) {
    Work work = named("memset %s %zu", name_of_kind(kind_of(to)), size);
    work.to = to, work.pitch[0] = (size_t)value, work.width = size;
    return submit(stream, work);
}

int cudaMemset(void *to, int value, size_t size) { return cudaMemsetAsync(to, value, size, NULL); }

int cuMemsetD8Async(void *to, unsigned char value, size_t size, void *stream) {
    return cudaMemsetAsync(to, value, size, stream);
}

/* ---------------------------------------------------------------------------------------- kernels */

static unsigned bucket(const void *key) { return (unsigned)(((uintptr_t)key >> 2) * 2654435761u >> 8) % BUCKETS; }

static void know(const void *key, const char *name) {
    Kernel *kernel = malloc(sizeof *kernel);
    *kernel = (Kernel){kernels[bucket(key)], key, name};
    kernels[bucket(key)] = kernel;
}

static const char *name_of(const void *key) {
    for (Kernel *kernel = kernels[bucket(key)]; kernel; kernel = kernel->next)
        if (kernel->key == key) return kernel->name;
    return "?";
}

void **__cudaRegisterFatBinary(void *binary) { return calloc(1, sizeof binary); }
void __cudaRegisterFatBinaryEnd(void **handle) { }
void __cudaUnregisterFatBinary(void **handle) { free(handle); }

void __cudaRegisterFunction(void **handle, const void *host, char *device, const char *name) {
    know(host, name);
}

void __cudaRegisterVar(void **handle, void *host, char *device, const char *name) {
    know(host, name);
}

int __cudaGetKernel(const void **kernel, const void *host) { *kernel = host; return SUCCESS; }

static __thread struct { Extent grid, block; size_t shared; void *stream; } pushed;

unsigned __cudaPushCallConfiguration(Extent grid, Extent block, size_t shared, void *stream) {
    pushed.grid = grid, pushed.block = block, pushed.shared = shared, pushed.stream = stream;
    return 0;
}

int __cudaPopCallConfiguration(Extent *grid, Extent *block, size_t *shared, void **stream) {
    *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared, *stream = pushed.stream;
    return SUCCESS;
}

static int launch(const void *kernel, Extent grid, Extent block, void *stream) {
    if (failure) return failure;
    return submit(stream, named("kernel %s grid %u %u %u block %u", name_of(kernel), grid.x, grid.y, grid.z, block.x));
}

int __cudaLaunchKernel(const void *kernel, Extent grid, Extent block, void **arguments, size_t shared, void *stream) {
    return launch(kernel, grid, block, stream);
}

int cudaLaunchKernelExC(const void *config, const void *kernel, void **arguments) {
    const struct { Extent grid, block; size_t shared; void *stream; } *how = config;
    return launch(kernel, how->grid, how->block, how->stream);
}

#define SAME(name, as) extern __typeof__(as) name __attribute__((alias(#as)))
SAME(cudaLaunchKernel, __cudaLaunchKernel); SAME(cudaLaunchCooperativeKernel, __cudaLaunchKernel);

int cudaLibraryLoadData(void **library, const void *code) { *library = (void *)code; return SUCCESS; }

int cudaLibraryGetKernel(const void **kernel, void *library, const char *name) {
    *kernel = strdup(name);
    know(*kernel, *kernel);
    return SUCCESS;
}

int cudaFuncGetAttributes(void *attributes, const void *kernel) {
    int *values = memset(attributes, 0, 144); /* three sizes, then the integers */
    values[6] = 1024, values[7] = 64, values[8] = values[9] = capability(), values[11] = SHARED;
    return SUCCESS;
}

int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count) { *count = 2; return SUCCESS; }

/* Read for the shared memory that a kernel wants: the sizes that its source computes are not known here. */
int cudaMemcpyFromSymbol(void *to, const void *symbol, size_t size, size_t offset) {
    say("read_symbol %s %zu", name_of(symbol), size);
    int code = forbidden("cudaMemcpyFromSymbol"), value = 64 * 1024;
    memset(to, 0, size);
    memcpy(to, &value, size < sizeof value ? size : sizeof value);
    return code;
}

/* ---------------------------------------------------------------------------------------- the device */

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    static const int known[][2] = {
        {1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 2147483647}, {6, 65535}, {7, 65535}, {8, 48 * 1024}, {9, 65536},
        {10, 32}, {12, 65536}, {13, 1980000}, {16, PROCESSORS}, {19, 1}, {31, 1}, {36, 2619000}, {37, 5120},
        {38, 50 << 20}, {39, 2048}, {40, 3}, {41, 1}, {78, 1}, {81, SHARED + 1024}, {82, 65536}, {83, 1}, {90, 1}, {95, 1},
        {97, SHARED}, {106, 32}, {111, 1024}, {115, 1}, {120, 1},
    };
    *value = attribute == 75 ? capability() / 10 : attribute == 76 ? capability() % 10 : 0;
    if (attribute == 18) *value = (int)setting("NULL_CUDA_INTEGRATED", 0);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i][0] == attribute) *value = known[i][1];
    return SUCCESS;
}

/* cudaDeviceProp, of 1,008 bytes: offsets and values of what callers read. */
int cudaGetDeviceProperties(char *properties, int device) {
    const struct { int offset; size_t value; } wide[] = {
        {288, memory()}, {296, 48 * 1024}, {352, 65536}, {624, SHARED + 1024}, {672, SHARED}};
    const int narrow[][2] = {{304, 65536}, {308, 32}, {320, 1024}, {324, 1024}, {328, 1024}, {332, 64}, {336, 2147483647},
                             {340, 65535}, {344, 65535}, {360, capability() / 10}, {364, capability() % 10},
                             {384, PROCESSORS}, {588, 1}, {592, 5120}, {596, 50 << 20}, {604, 2048}, {632, 65536}, {668, 1},
                             {688, 32}, {720, 1}};
    memset(properties, 0, 1008);
    strcpy(properties, "null");
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++) *(size_t *)(properties + wide[i].offset) = wide[i].value;
    for (size_t i = 0; i < sizeof narrow / sizeof *narrow; i++) *(int *)(properties + narrow[i][0]) = narrow[i][1];
    return SUCCESS;
}

int cudaGetDevice(int *device) { *device = 0; return SUCCESS; }
int cudaGetDeviceCount(int *count) { *count = 1; return SUCCESS; }
int cudaDriverGetVersion(int *version) { *version = VERSION; return SUCCESS; }
int cudaGetLastError(void) { return failure; }
const char *cudaGetErrorName(int code) { return code == NO_MEMORY ? "out of memory" : "cudaError"; }
int cuDeviceGet(int *device, int number) { *device = number; return number ? 101 : SUCCESS; }
int cuDeviceGetName(char *name, int size, int device) { snprintf(name, (size_t)size, "null"); return SUCCESS; }
int cuDeviceTotalMem(size_t *size, int device) { *size = memory(); return SUCCESS; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &default_stream; return SUCCESS; }

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    *function = dlsym(dlopen("libcuda.so.1", RTLD_LAZY), name);
    if (status) *status = *function == NULL;
    return *function ? SUCCESS : NOT_FOUND;
}

int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, uint64_t flags, int *status) {
    say("entry_point %s", name);
    *function = dlsym(dlopen("libcuda.so.1", RTLD_LAZY), name);
    if (status) *status = *function == NULL;
    return SUCCESS;
}

SAME(cudaPeekAtLastError, cudaGetLastError); SAME(cuDeviceTotalMem_v2, cuDeviceTotalMem);
SAME(cuMemGetInfo_v2, cudaMemGetInfo); SAME(cudaRuntimeGetVersion, cudaDriverGetVersion);
SAME(cudaGetErrorString, cudaGetErrorName); SAME(cuDriverGetVersion, cudaDriverGetVersion);
SAME(cuDeviceGetAttribute, cudaDeviceGetAttribute); SAME(cuDeviceGetCount, cudaGetDeviceCount);
SAME(cuMemGetInfo, cudaMemGetInfo); SAME(cuEventCreate, cudaEventCreateWithFlags);
SAME(cuEventDestroy, cudaEventDestroy); SAME(cuEventElapsedTime, cudaEventElapsedTime);
SAME(cuMemcpyDtoDAsync, cuMemcpyAsync); SAME(cuStreamCreate, cudaStreamCreateWithFlags);
SAME(cuStreamDestroy, cudaStreamDestroy); SAME(cuStreamSynchronize, cudaStreamSynchronize);
SAME(cuStreamBeginCapture, cudaStreamBeginCapture); SAME(cuStreamEndCapture, cudaStreamEndCapture);
SAME(cuGraphInstantiate, cudaGraphInstantiate); SAME(cuGraphInstantiateWithFlags, cudaGraphInstantiate);
SAME(cuGraphLaunch, cudaGraphLaunch); SAME(cuGraphExecDestroy, cudaGraphExecDestroy);

/* ---------------------------------------------------------------------------------------- cuBLAS and the rest */

typedef struct { void *stream; } Handle;

int cublasCreate_v2(void **handle) { *handle = calloc(1, sizeof(Handle)); return SUCCESS; }
int cublasDestroy_v2(void *handle) { free(handle); return SUCCESS; }
int cublasSetStream_v2(Handle *handle, void *stream) { handle->stream = stream; return SUCCESS; }
int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return SUCCESS; }
const char *cublasGetStatusName(int code) { return "CUBLAS_STATUS"; }

#define PRODUCT(name) \
    int name(Handle *handle, int a, int b, int m, int n, int k) { \
        return submit(handle->stream, named(#name " m %d n %d k %d", m, n, k)); \
    }
PRODUCT(cublasSgemm_v2) PRODUCT(cublasDgemm_v2) PRODUCT(cublasGemmEx) PRODUCT(cublasSgemmBatched)
PRODUCT(cublasDgemmBatched) PRODUCT(cublasGemmBatchedEx) PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasDgemmStridedBatched) PRODUCT(cublasGemmStridedBatchedEx)

int cublasLtMatmul(void *handle, void *product, void *alpha, void *a, void *a_layout, void *b, void *b_layout, void *beta,
                   void *c, void *c_layout, void *d, void *d_layout, void *algorithm, void *memory, size_t size,
                   void *stream) {
    
    return submit(stream, named("cublasLtMatmul"));
}

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, void *results, int *count) {
    memset(results, 0, 96);
    *count = 1;
    return SUCCESS;
}

#define CREATE(name) int name(void **object) { *object = &default_stream; return SUCCESS; }
CREATE(cublasLtCreate) CREATE(cublasLtMatmulDescCreate) CREATE(cublasLtMatmulPreferenceCreate)
CREATE(cublasLtMatrixLayoutCreate) CREATE(cublasLtMatrixTransformDescCreate) CREATE(cudaMemPoolCreate)

#define NOTHING(name) int name(void) { return SUCCESS; }
NOTHING(cuInit) NOTHING(cuCtxSetCurrent) NOTHING(cuDevicePrimaryCtxRelease) NOTHING(cuDevicePrimaryCtxRelease_v2)
NOTHING(cuGraphDestroy) NOTHING(cuTensorMapEncodeTiled) NOTHING(cudaEventRecord) NOTHING(cuEventRecord)
NOTHING(cudaEventRecordWithFlags) NOTHING(cudaFuncSetAttribute) NOTHING(cudaGraphDestroy)
NOTHING(cudaKernelSetAttributeForDevice) NOTHING(cudaLibraryUnload) NOTHING(cudaMemPoolDestroy)
NOTHING(cudaMemPoolGetAttribute) NOTHING(cudaMemPoolSetAttribute) NOTHING(cudaMemPoolTrimTo) NOTHING(cudaSetDevice)
NOTHING(cudaStreamWaitEvent) NOTHING(cublasSetMathMode) NOTHING(cublasDgeam) NOTHING(cublasSgeam)
NOTHING(cublasScopy_v2) NOTHING(cublasSscal_v2) NOTHING(cublasSgetrfBatched) NOTHING(cublasDgetrfBatched)
NOTHING(cublasSgetriBatched) NOTHING(cublasDgetriBatched) NOTHING(cublasLtDestroy) NOTHING(cublasLtMatmulAlgoInit)
NOTHING(cublasLtMatmulAlgoConfigSetAttribute) NOTHING(cublasLtMatmulDescDestroy)
NOTHING(cublasLtMatmulDescSetAttribute) NOTHING(cublasLtMatmulPreferenceDestroy) NOTHING(cublasLtMatrixTransform)
NOTHING(cublasLtMatmulPreferenceSetAttribute) NOTHING(cublasLtMatrixLayoutDestroy)
NOTHING(cublasLtMatrixTransformDescDestroy) NOTHING(cublasLtMatrixLayoutSetAttribute)
SAME(cublasGetStatusString, cublasGetStatusName);
