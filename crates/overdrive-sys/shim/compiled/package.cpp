// A model of a package that torch.export and AOTInductor created.
#include "../guard.h"
#include "../tensors.h"
#include "compiled.h"

#include <ATen/DynamicLibrary.h>
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

// The runner has no function for the number of inputs, although the library that it loaded has.
struct Runner : torch::inductor::AOTIModelContainerRunner {
  static size_t inputs(AOTIModelContainerRunner& runner) {
    auto& library = runner.*(&Runner::model_so_);
    const auto container = runner.*(&Runner::container_handle_);
    const auto get = reinterpret_cast<decltype(&AOTInductorModelContainerGetNumInputs)>(
        library->sym("AOTInductorModelContainerGetNumInputs"));
    size_t inputs = 0;
    TORCH_CHECK(get(container, &inputs) == 0, "the model does not report its number of inputs");
    return inputs;
  }
};

bool lies_alike(const at::Tensor& tensor, const at::Tensor& like) {
  return tensor.strides() == like.strides() && tensor.device() == like.device();
}

}  // namespace

namespace overdrive {

// Tensors whose memory the code uses by its address.
class Shared {
 public:
  Shared() = default;
  // The container points to the nodes of the map, which stay in place when it is moved.
  explicit Shared(std::unordered_map<std::string, at::Tensor> tensors) : tensors_(std::move(tensors)) {
    for (const auto& [name, tensor] : tensors_) addresses_.push_back({&name, &tensor, tensor.storage().data()});
  }

  size_t count(const std::string& name) const { return tensors_.count(name); }

  // Resizing a storage frees the memory that the code would go on to use. The tensors here are detached, so a
  // caller cannot give them another storage.
  void check() const {
    for (const auto& [name, tensor, address] : addresses_) {
      if (tensor->storage().data() == address && holds_elements(*tensor)) continue;
      throw BadArgument("the storage of constant " + *name +
                        " was resized after it was given to share: replace the constant again");
    }
  }

 private:
  struct Address {
    const std::string* name;
    const at::Tensor* tensor;
    const void* data;
  };
  std::unordered_map<std::string, at::Tensor> tensors_;
  std::vector<Address> addresses_;
};

}  // namespace overdrive

using overdrive::Shared;

struct od_package {
  torch::inductor::AOTIModelPackageLoader loader;
  size_t inputs = 0;
  // Those of the active and of the prepared constants.
  Shared active;
  Shared prepared;
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
    std::unique_ptr<od_package> package(new od_package{
        {path, model, single_threaded != 0, runners, static_cast<c10::DeviceIndex>(device_index)}, 0, {}, {}});
    package->inputs = Runner::inputs(*package->loader.get_runner());
    *out = package.release();
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
    // The code takes as many handles from the list as it has inputs, whatever its length.
    if (n != package->inputs) {
      throw overdrive::BadArgument("the model takes " + std::to_string(package->inputs) + " inputs, but " +
                                   std::to_string(n) + " were given");
    }
    auto list = overdrive::as_tensors(inputs, n);
    for (size_t k = 0; k < n; ++k) {
      // The code checks dtypes, sizes and static strides itself, but reads by the strides of its example.
      const auto problem = overdrive::unfit_for_addresses(list[k]);
      if (!problem.empty()) throw overdrive::BadArgument("input " + std::to_string(k) + " " + problem);
    }
    package->active.check();
    for (auto& tensor : package->loader.boxed_run(std::move(list))) {
      push(into, new at::Tensor(std::move(tensor)));
    }
  });
}

extern "C" od_status* od_package_constants(od_package* package, int32_t readable, void* into,
                                           void (*take)(void*, const char*,
                                                        const void*)) noexcept {
  return overdrive::guard([&] {
    if (readable) package->active.check();
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
      // Its elements are copied, or the code uses them.
      if (!overdrive::holds_elements(from)) {
        throw overdrive::BadArgument("the storage of constant " + name + " was resized: pass the constant again");
      }
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
      package->prepared = Shared(std::move(all));
    } else {
      package->prepared = Shared();
    }
  });
}

extern "C" od_status* od_package_commit(od_package* package) noexcept {
  return overdrive::guard([&] {
    auto* runner = package->loader.get_runner();
    runner->swap_constant_buffer();
    std::swap(package->active, package->prepared);
    runner->free_inactive_constant_buffer();
    package->prepared = Shared();
  });
}
