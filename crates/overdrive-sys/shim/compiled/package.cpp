// A model of a package that torch.export and AOTInductor created.
#include "../guard.h"
#include "compiled.h"

#include <ATen/ops/empty_strided.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <dlfcn.h>
#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <cstdlib>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

using Tensors = std::unordered_map<std::string, at::Tensor>;

// Compiled code checks its inputs (dtypes, sizes, strides) only if this variable is set in its first run;
// without it, wrong inputs make it read invalid memory. It is set while the program has one thread; a
// value that the user set is kept.
struct CheckInputs {
  CheckInputs() noexcept { setenv("AOTI_RUNTIME_CHECK_INPUTS", "1", 0); }
} check_inputs;

// Returns a tensor of the same values with the strides that the compiled code expects, alone in its storage,
// because the container copies whole storages.
at::Tensor as_constant(const at::Tensor& from, const at::Tensor& like) {
  auto fresh = at::empty_strided(like.sizes(), like.strides(), like.options());
  fresh.copy_(from);
  return fresh;
}

bool lies_alike(const at::Tensor& tensor, const at::Tensor& like) {
  return tensor.strides() == like.strides() && tensor.device() == like.device();
}

}  // namespace

struct od_package {
  torch::inductor::AOTIModelPackageLoader loader;
  // The tensors whose memory the active and the prepared constants use.
  Tensors active;
  Tensors prepared;
};

// The dynamic linker uses a loaded library for a dependency if their names agree. A file libtorch.so that it
// would find otherwise may be a linker script (`INPUT(libtorch_cpu.so)`), which it cannot load.
extern "C" od_status* od_package_name_libtorch(const uint8_t* library, size_t len) noexcept {
  return overdrive::guard([&] {
#ifdef __linux__
    if (dlopen("libtorch.so", RTLD_NOLOAD | RTLD_LAZY)) return;
    const int file = memfd_create("libtorch.so", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0, "no memory for an empty libtorch.so");
    const auto written = write(file, library, len);
    const auto path = "/proc/self/fd/" + std::to_string(file);
    void* loaded = written == static_cast<ssize_t>(len) ? dlopen(path.c_str(), RTLD_NOW) : nullptr;
    const char* why = loaded ? nullptr : dlerror();
    close(file);
    TORCH_CHECK(loaded, "the empty libtorch.so cannot be loaded: ", why ? why : "it was not written");
#endif
  });
}

extern "C" od_status* od_package_open(const char* path, const char* model, int32_t single_threaded,
                                      size_t runners, int32_t device_index,
                                      od_package** out) noexcept {
  return overdrive::guard([&] {
    *out = new od_package{{path, model, single_threaded != 0, runners,
                           static_cast<c10::DeviceIndex>(device_index)},
                          {},
                          {}};
  });
}

extern "C" void od_package_free(od_package* package) noexcept {
  try {
    delete package;
  } catch (...) {
    // A free function cannot report an error.
  }
}

extern "C" od_status* od_package_call_spec(od_package* package, char** inputs,
                                           char** outputs) noexcept {
  return overdrive::guard([&] {
    const auto spec = package->loader.get_call_spec();
    TORCH_CHECK(spec.size() == 2, "the call spec has ", spec.size(), " elements; it must have 2");
    *outputs = overdrive::copy_string(spec[1]);
    *inputs = overdrive::copy_string(spec[0]);
  });
}

extern "C" od_status* od_package_run(od_package* package, const od_tensor* inputs, size_t n,
                                     void* into, void (*push)(void*, od_tensor)) noexcept {
  return overdrive::guard([&] {
    std::vector<at::Tensor> list;
    list.reserve(n);
    for (size_t k = 0; k < n; ++k) list.push_back(*static_cast<const at::Tensor*>(inputs[k]));
    for (auto& tensor : package->loader.boxed_run(std::move(list))) {
      push(into, new at::Tensor(std::move(tensor)));
    }
  });
}

extern "C" od_status* od_package_constants(od_package* package, void* into,
                                           void (*take)(void*, const char*,
                                                        const void*)) noexcept {
  return overdrive::guard([&] {
    for (const auto& [name, tensor] : package->loader.get_runner()->extract_constants_map(false)) {
      take(into, name.c_str(), &tensor);
    }
  });
}

extern "C" od_status* od_package_prepare(od_package* package, const char* const* names,
                                         const od_tensor* tensors, size_t n,
                                         int32_t share) noexcept {
  return overdrive::guard([&] {
    auto* runner = package->loader.get_runner();
    const auto held = runner->extract_constants_map(false);
    std::unordered_map<std::string, const at::Tensor*> given;
    for (size_t k = 0; k < n; ++k) {
      if (!held.count(names[k])) throw overdrive::NotFound(std::string("there is no constant ") + names[k]);
      given[names[k]] = static_cast<const at::Tensor*>(tensors[k]);
    }
    // The second set must contain every constant by its name in the code: a missing one would be an undefined
    // tensor after the swap.
    Tensors all;
    for (const auto& [internal, name] : runner->getConstantNamesToOriginalFQNs()) {
      const auto old = held.find(name);
      if (old == held.end()) continue;  // computed from others in the first run
      const auto fresh = given.find(name);
      const auto from = (fresh == given.end() ? old->second : *fresh->second).detach();
      if (from.sizes() != old->second.sizes() || from.scalar_type() != old->second.scalar_type()) {
        throw overdrive::BadArgument("constant " + name + " has another dtype or shape");
      }
      const bool whole = from.storage_offset() == 0 &&
                         from.storage().nbytes() == from.numel() * from.itemsize();
      const bool ours = fresh == given.end() && !package->active.count(internal);
      const bool as_it_is = lies_alike(from, old->second) && (share ? !ours : whole);
      all.emplace(internal, as_it_is ? from : as_constant(from, old->second));
    }
    runner->update_constant_buffer(all, /*use_inactive=*/true, /*validate_full_updates=*/false,
                                   /*user_managed=*/share != 0);
    if (share) {
      // The container points to the nodes of the map, which stay in place when the map is moved.
      package->prepared = std::move(all);
    } else {
      package->prepared.clear();
    }
  });
}

extern "C" od_status* od_package_commit(od_package* package) noexcept {
  return overdrive::guard([&] {
    auto* runner = package->loader.get_runner();
    runner->swap_constant_buffer();
    package->active.swap(package->prepared);
    runner->free_inactive_constant_buffer();
    package->prepared.clear();
  });
}
