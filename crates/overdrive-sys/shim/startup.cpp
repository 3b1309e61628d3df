// Start-up before `main`: settings of libtorch for the whole process, and the CUDA back end. It is loaded if its library
// lies beside libtorch_cpu, so that one binary, which is linked only against the CPU libraries, uses a GPU if there is one.
// `OVERDRIVE_NO_CUDA=1` in the environment disables this, and hides the GPUs from a binary that is linked against
// the CUDA libraries, which nothing can keep from being loaded.
#include "guard.h"
#include "startup.h"

#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Logging.h>

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

enum { ABSENT = 0, LOADED = 1, FAILED = 2 };

struct CudaLibrary {
  int32_t state = ABSENT;
  std::string detail;
};

std::string folder_of_libtorch() {
  Dl_info info{};
  // Any function of libc10 serves: the libraries of libtorch lie in one folder.
  if (!dladdr(reinterpret_cast<void*>(&c10::alloc_cpu), &info) || !info.dli_fname) return {};
  std::string path(info.dli_fname);
  const auto slash = path.rfind('/');
  return slash == std::string::npos ? std::string(".") : path.substr(0, slash);
}

bool is_disabled() {
  const char* off = std::getenv("OVERDRIVE_NO_CUDA");
  return off && *off && std::string(off) != "0";
}

CudaLibrary load_cuda() {
  CudaLibrary result;
  if (is_disabled()) {
    result.detail = "not used because OVERDRIVE_NO_CUDA is set";
    return result;
  }
#ifdef __linux__
  const std::string path = folder_of_libtorch() + "/libtorch_cuda.so";
  FILE* file = std::fopen(path.c_str(), "rb");
  if (!file) {
    result.detail = "no " + path;
    return result;
  }
  std::fclose(file);
  // RTLD_GLOBAL: the libraries that libtorch_cuda loads later look for its symbols.
  if (dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL)) {
    result.state = LOADED;
    result.detail = path;
  } else {
    result.state = FAILED;
    const char* why = dlerror();
    result.detail = why ? why : path;
  }
#else
  result.detail = "CUDA is supported on Linux only";
#endif
  return result;
}

// Leaves the C++ frames out of libtorch's errors, as Python does: some twenty lines that hide the message, and whose names
// take longer to look up than most operations. `TORCH_SHOW_CPP_STACKTRACES=1` keeps them, as in PyTorch.
void leave_out_frames() {
  const char* show = std::getenv("TORCH_SHOW_CPP_STACKTRACES");
  if (show && std::string(show) == "1") return;
  c10::SetStackTraceFetcher([] { return std::string(); });
}

const CudaLibrary& cuda_library() {
  static const CudaLibrary library = load_cuda();
  return library;
}

// Runs when the program is loaded, after the constructors of libtorch's own libraries.
struct Startup {
  Startup() noexcept {
    overdrive::install_cpu_allocator();
    // libtorch's profiler warns on standard error that there is no GPU. The variable is set here, while
    // there is one thread, because changing the environment later is a data race. A value that the user
    // set is kept.
    setenv("KINETO_LOG_LEVEL", "99", 0);
    // Before the CUDA runtime reads it, for a binary that is linked against it. An empty list has no GPU.
    if (is_disabled()) setenv("CUDA_VISIBLE_DEVICES", "", 1);
    try {
      leave_out_frames();
      const auto& library = cuda_library();
      // Else the program would run on the CPU in silence. On standard error, because no log exists before `main`.
      if (library.state == FAILED) {
        std::fprintf(stderr,
                     "overdrive: no GPU is used, because libtorch's CUDA library could not be loaded: %s "
                     "(OVERDRIVE_NO_CUDA=1 leaves it out)\n",
                     library.detail.c_str());
      }
    } catch (...) {
      // od_cuda_library tries again and reports the error.
    }
  }
} startup;

}  // namespace

extern "C" od_status* od_cuda_library(int32_t* state, char** detail) noexcept {
  return overdrive::guard([&] {
    const auto& library = cuda_library();
    *detail = overdrive::copy_string(library.detail);
    *state = library.state;
  });
}

// Calls the CUDA runtime that libtorch has loaded, so that no CUDA header is needed.
extern "C" od_status* od_cuda_compute_capability(int32_t device, int32_t* major, int32_t* minor) noexcept {
  return overdrive::guard([&] {
    using GetAttribute = int (*)(int* value, int attribute, int device);
    constexpr int MAJOR = 75;  // cudaDevAttrComputeCapabilityMajor
    constexpr int MINOR = 76;  // cudaDevAttrComputeCapabilityMinor
    auto get = reinterpret_cast<GetAttribute>(dlsym(RTLD_DEFAULT, "cudaDeviceGetAttribute"));
    TORCH_CHECK(get, "no CUDA runtime is loaded");
    int high = 0, low = 0;
    const int failed = get(&high, MAJOR, device) | get(&low, MINOR, device);
    TORCH_CHECK(failed == 0, "the CUDA runtime does not know device ", device, " (its error ", failed, ")");
    *major = high;
    *minor = low;
  });
}
