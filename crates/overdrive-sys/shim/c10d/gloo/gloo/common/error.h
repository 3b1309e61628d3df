// Stands in for Gloo's header, which the wheels of libtorch leave out: ProcessGroupGloo.hpp includes it
// and uses nothing of it.
#pragma once
