// Builds a model of 1 GiB and shards it, with little memory.
//
//   start_probe eager|deferred [MIB]
//
// Each rank prints "rank R sum HEX" with the bits of a sum over all parameters, gathered one after
// the other, and "rank R sharded". With MIB the process may take so much more private memory than
// it has when the model is built.

#include <sys/resource.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <string>

namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

int64_t private_bytes() {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("VmData:")) return std::stoll(line.substr(7)) * 1024;
  }
  return 0;
}

void allow_more(int64_t nbytes) {
  const auto limit = static_cast<rlim_t>(private_bytes() + nbytes);
  const rlimit limits{limit, limit};
  TORCH_CHECK(::setrlimit(RLIMIT_DATA, &limits) == 0, "setrlimit failed");
}

std::shared_ptr<torch::nn::SequentialImpl> build() {
  torch::nn::Sequential model;
  for (int i = 0; i < 16; ++i)
    model->push_back(torch::nn::Linear(torch::nn::LinearOptions(4096, 4096).bias(false)));
  return model.ptr();
}

void start(bool deferred, int64_t mib) {
  const auto world = tessera::init();
  tessera::manual_seed(5);
  tessera::materialize(torch::ones({8}));  // loads the code
  if (mib > 0) allow_more(mib * kMiB);
  const auto model = [&] {
    std::optional<tessera::DeferredInit> scope;
    if (deferred) scope.emplace();
    return build();
  }();
  const auto sharded = tessera::fully_shard(model, {.unit_bytes = 64 * kMiB, .prefetch = 0});
  std::printf("rank %d sharded\n", world.rank());
  const torch::NoGradGuard no_grad;
  double sum = 0;
  for (const torch::Tensor& param : model->parameters()) sum += param.sum().item<double>();
  std::printf("rank %d sum %a\n", world.rank(), sum);
}

}  // namespace

int main(int count, char** arguments) {
  try {
    start(count > 1 && std::string(arguments[1]) == "deferred",
          count > 2 ? std::atoll(arguments[2]) : 0);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
