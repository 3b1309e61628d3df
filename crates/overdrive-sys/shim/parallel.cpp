// Parallel loops on the threads of libtorch's CPU kernels.
//
// libtorch's OpenMP run-time is found in the process by name, through the entry point that compilers emit for
// `#pragma omp parallel`. Compiling this file with -fopenmp would link the compiler's own OpenMP instead: a
// second pool of threads beside the first.
#include "shim.h"

#include <ATen/Parallel.h>

#include <dlfcn.h>

namespace {

using parallel_t = void (*)(void (*)(void*), void*, unsigned, unsigned);
using number_t = int (*)();

struct OpenMp {
  parallel_t parallel = reinterpret_cast<parallel_t>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  number_t thread = reinterpret_cast<number_t>(dlsym(RTLD_DEFAULT, "omp_get_thread_num"));
  number_t threads = reinterpret_cast<number_t>(dlsym(RTLD_DEFAULT, "omp_get_num_threads"));
  number_t nested = reinterpret_cast<number_t>(dlsym(RTLD_DEFAULT, "omp_in_parallel"));
  bool complete() const { return parallel && thread && threads && nested; }
};

const OpenMp& openmp() {
  static const OpenMp found;
  return found;
}

struct Team {
  od_team_work work;
  void* self;
};

}  // namespace

extern "C" int32_t od_parallel_threads(void) noexcept {
  if (!openmp().complete() || openmp().nested()) return 1;
  return at::get_num_threads();
}

extern "C" void od_parallel(int32_t threads, od_team_work work, void* self) noexcept {
  if (threads <= 1 || !openmp().complete()) {
    work(self, 0, 1);
    return;
  }
  Team team{work, self};
  openmp().parallel(
      [](void* data) {
        const auto* team = static_cast<const Team*>(data);
        team->work(team->self, openmp().thread(), openmp().threads());
      },
      &team, static_cast<unsigned>(threads), 0);
}
