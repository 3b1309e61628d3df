// Stands in for libcuda.so.1 and for libtorch's current stream, so that launches can be tested without a GPU.
//
// It writes a line for each call to the file LOG. CAPABILITY is the compute capability that it claims, times ten. A
// module is either a cubin, of which it knows nothing, or PTX, whose parameters it reads: then it writes the values of
// each launch, and where COMPUTE is defined it does in plain loops what the kernel of that name does in f32.
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST 40

typedef struct {
  char name[64];
  uint64_t hash;         // of the PTX
  int count;             // of the parameters; -1 where they are not known
  char types[MOST];      // 'p' for 8 bytes, 'i' for 4, 'f' for a float
} Function;

static int context = 0, stream = 0;
static _Thread_local void* current = NULL;
static _Thread_local void* below = NULL;

static void say(const char* format, ...) {
  FILE* file = fopen(LOG, "a");
  va_list arguments;
  va_start(arguments, format);
  vfprintf(file, format, arguments);
  va_end(arguments);
  fputc('\n', file);
  fclose(file);
}

int cuInit(unsigned flags) { return flags != 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal + 100; return 0; }
int cuDevicePrimaryCtxRetain(void** into, int device) { say("retain %d", device); *into = &context; return 0; }
int cuCtxGetCurrent(void** into) { *into = current; return 0; }
int cuCtxPushCurrent_v2(void* pushed) { say("push"); below = current; current = pushed; return 0; }
int cuCtxPopCurrent_v2(void** into) { say("pop"); *into = current; current = below; return 0; }

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  *value = attribute == 75 ? CAPABILITY / 10 : attribute == 76 ? CAPABILITY % 10 : attribute == 16 ? 2 : -1;
  return 0;
}

int cuGetErrorName(int code, const char** name) {
  *name = code == 200 ? "CUDA_ERROR_INVALID_IMAGE" : NULL;
  return *name == NULL;
}

// The capture lasts while there is a file LOG.capture.
int cuStreamIsCapturing(void* asked, int* status) {
  FILE* file = fopen(LOG ".capture", "r");
  *status = file != NULL;
  if (file) fclose(file);
  return asked != &stream;
}

// Every capture has the number that the file begins with.
int cuStreamGetCaptureInfo_v2(void* asked, int* status, uint64_t* id, void* graph, void* dependencies, void* count) {
  FILE* file = fopen(LOG ".capture", "r");
  unsigned long long number = 0;
  *status = file != NULL;
  if (file) {
    if (fscanf(file, "%llu", &number) != 1) number = 1;
    fclose(file);
  }
  *id = number;
  return asked != &stream || graph || dependencies || count;
}

int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** into) {
  *into = &stream;
  return device != 0;
}

static uint64_t fnv(const char* bytes, size_t length) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (size_t i = 0; i < length; ++i) hash = (hash ^ (unsigned char)bytes[i]) * 0x100000001b3u;
  return hash;
}

int cuModuleLoadData(void** module, const void* image) {
  Function* function = calloc(1, sizeof(Function));
  const char* text = image;
  if (current != &context) return 201;
  if (memcmp(text, "\177ELF", 4) == 0) {
    // The architecture is in the flags of the header, at offset 48; with the ABI 65 in their second byte.
    say("cubin for %d", (unsigned char)text[text[7] == 65 ? 49 : 48]);
    function->count = -1;
  } else {
    const char* entry = strstr(text, ".visible .entry ");
    if (!entry) return 200;
    function->hash = fnv(text, strlen(text));
    say("ptx %016llx", (unsigned long long)function->hash);
    const char* end = strchr(entry, ')');
    sscanf(entry, ".visible .entry %63[^(]", function->name);
    for (const char* at = entry; (at = strstr(at, ".param .")) && at < end; at += 8) {
      const char* type = at + 8;
      function->types[function->count++] = strncmp(type, "f32", 3) == 0 ? 'f' : type[1] == '3' ? 'i' : 'p';
    }
  }
  *module = function;
  return 0;
}

int cuModuleGetFunction(void** into, void* module, const char* name) {
  Function* function = module;
  if (function->count >= 0 && strcmp(function->name, name) != 0) return 500;
  snprintf(function->name, sizeof function->name, "%s", name);
  *into = function;
  return 0;
}

int cuFuncSetAttribute(void* function, int attribute, int value) {
  say("attribute %d of %s is %d", attribute, ((Function*)function)->name, value);
  return 0;
}

int cuFuncLoad(void* function) { say("load %s", ((Function*)function)->name); return 0; }

#ifdef COMPUTE
#include "compute.h"
#endif

int cuLaunchKernel(void* handle, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                   unsigned threads_z, unsigned shared, void* on, void** parameters, void** extra) {
  Function* function = handle;
  char line[2048];
  int length = 0;
  if (current != &context || on != &stream || extra || threads_y != 1 || threads_z != 1 || z != 1) return 1;
  for (int i = 0; i < function->count; ++i) {
    char* to = line + length;
    size_t room = sizeof line - (size_t)length;
    switch (function->types[i]) {
      case 'f': length += snprintf(to, room, " %.9g", (double)*(float*)parameters[i]); break;
      case 'i': length += snprintf(to, room, " %d", *(int32_t*)parameters[i]); break;
      default: length += snprintf(to, room, " %lld", *(long long*)parameters[i]);
    }
  }
  line[length] = 0;
  say("launch %016llx %s %u %u %u %u%s", (unsigned long long)function->hash, function->name, x, y, threads, shared,
      line);
#ifdef COMPUTE
  return compute(function->name, function->count, x, y, parameters);
#else
  return 0;
#endif
}
