#include <ATen/ops/zeros.h>
#include <tessera/comm/world.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "benchmarks/link_bench.h"
#include "benchmarks/worker_process.h"

namespace tessera::tools {
namespace {

// Sends and receives `nbytes` while each other rank does, and returns the seconds.
double transfer(ProcessGroup& ranks, int ranks_per_host, int64_t nbytes) {
  const int size = ranks.size(), rank = ranks.rank();
  const auto bytes = [&] { return at::zeros({nbytes}, at::TensorOptions().dtype(at::kByte)); };
  std::vector<at::Tensor> to(size), from(size);
  to[(rank + ranks_per_host) % size] = bytes();
  from[(rank + size - ranks_per_host) % size] = bytes();
  ranks.barrier({"begin", Channel::kControl});
  const auto start = std::chrono::steady_clock::now();
  ranks.all_to_all(from, to, {"transfer", Channel::kParams})->wait();
  ranks.barrier({"end", Channel::kControl});
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

int bench_link_worker() {
  std::optional<World> world;
  return serve_commands([&](const std::string& verb, int64_t nbytes) -> nlohmann::json {
    if (!world) world.emplace(init({.transport = Transport::kGloo}));
    TORCH_CHECK_VALUE(verb == "transfer", "[bench_link_worker] a command must be transfer; got '",
                      verb, "'");
    return {{"seconds", transfer(*world->process_group(), world->info().local_size, nbytes)}};
  });
}

}  // namespace tessera::tools
