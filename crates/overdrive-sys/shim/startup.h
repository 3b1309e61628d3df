#pragma once

namespace overdrive {

// Puts Overdrive's CPU allocator in the place of libtorch's. Tensors made before keep theirs.
void install_cpu_allocator() noexcept;

}  // namespace overdrive
