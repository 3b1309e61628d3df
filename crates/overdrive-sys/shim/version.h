// The version of libtorch that the shim is compiled with.
#pragma once

#include <torch/csrc/api/include/torch/version.h>

#define OVERDRIVE_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))
