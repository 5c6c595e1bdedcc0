#pragma once

#include <c10/util/intrusive_ptr.h>
#include <tessera/export.h>

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace tessera {

/// Makes c10d's own Gloo backend, with `threads` threads for its own collectives and `connections`
/// sockets between two ranks; a message uses socket number `tag % connections`. Exported for the
/// tests and for the benchmark that compares with it.
TESSERA_API c10::intrusive_ptr<c10d::Backend> gloo_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout, const std::string& hostname, int threads = 2,
    int connections = 1);

}  // namespace tessera
