// Stands in for Gloo's header, which the wheels of libtorch leave out: types that are only pointed at.
#pragma once

namespace gloo {
namespace transport {
class Device;
class UnboundBuffer;
}  // namespace transport
}  // namespace gloo
