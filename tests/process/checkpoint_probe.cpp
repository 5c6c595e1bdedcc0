// Looks at the checkpoint in a directory, and then replaces it until it is killed.
//
//     checkpoint_probe DIRECTORY [--look]
//
// All values of save number N (parameters, buffers, optimizer state, the caller's number) are N, so
// that parts of two saves would be seen. Prints "found N" or "found none"; then, unless --look is
// given, "ready", and "saved N" after each save. Of three saves, one is of whole parameters and one
// goes on in the background while the values change.

#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>
#include <exception>
#include <string>

namespace fs = std::filesystem;
using torch::optim::AdamW;

namespace {

// Values in units that several saves don't fill at once.
std::shared_ptr<torch::nn::SequentialImpl> make_net() {
  return std::make_shared<torch::nn::SequentialImpl>(
      torch::nn::Linear(24, 40), torch::nn::BatchNorm1d(40), torch::nn::Linear(40, 40),
      torch::nn::Linear(40, 3));
}

void set_values(torch::nn::Module& net, AdamW& adamw, double value) {
  const torch::NoGradGuard no_grad;
  for (auto& param : net.parameters()) param.fill_(value);
  for (auto& buffer : net.buffers()) buffer.fill_(value);
  for (auto& entry : adamw.state()) {
    auto& state = static_cast<torch::optim::AdamWParamState&>(*entry.second);
    state.exp_avg().fill_(value);
    state.exp_avg_sq().fill_(value);
    state.step(static_cast<int64_t>(value));
  }
}

void check_values(torch::nn::Module& net, AdamW& adamw, double value) {
  const auto check = [&](const torch::Tensor& tensor) {
    TORCH_CHECK((tensor == value).all().item<bool>(), "broken: a tensor is not ", value, " but ",
                tensor);
  };
  for (const auto& param : net.parameters()) check(param);
  for (const auto& buffer : net.buffers()) check(buffer);
  TORCH_CHECK(adamw.state().size() == net.parameters().size(), "broken: some state is missing");
  for (auto& entry : adamw.state()) {
    auto& state = static_cast<torch::optim::AdamWParamState&>(*entry.second);
    check(state.exp_avg());
    check(state.exp_avg_sq());
    TORCH_CHECK(static_cast<double>(state.step()) == value, "broken: a count");
  }
}

// The number of the save that is in the directory; 0 if there is none.
double look(const fs::path& path) {
  if (!fs::exists(path) && !fs::exists(path.string() + ".old")) return 0;
  auto net = make_net();
  AdamW adamw(net->parameters());
  const double found = tessera::load_checkpoint(path, *net, &adamw).numbers.at("save");
  check_values(*net, adamw, found);
  return found;
}

[[noreturn]] void save_for_ever(const fs::path& path, double number) {
  const auto world = tessera::init();
  auto net = make_net();
  auto sharded = tessera::fully_shard(net, {.unit_bytes = 2000});
  AdamW adamw(net->parameters());
  tessera::ShardedOptimizer optimizer(sharded, adamw);
  sharded(torch::randn({8, 24})).sum().backward();
  optimizer.step();  // so that there is state
  std::puts("ready");
  tessera::AsyncCheckpointer checkpointer;
  while (true) {
    set_values(*net, adamw, ++number);
    const int kind = static_cast<int>(number) % 3;
    const tessera::SaveOptions options{.numbers = {{"save", number}},
                                       .whole_parameters = kind == 0};
    if (kind == 1) {
      checkpointer.save(path, sharded, &optimizer, options);
      set_values(*net, adamw, -1);
      checkpointer.wait();
    } else {
      save_checkpoint(path, sharded, &optimizer, options);
    }
    std::printf("saved %.0f\n", number);
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  try {
    const double found = look(argv[1]);
    std::printf(found > 0 ? "found %.0f\n" : "found none\n", found);
    if (argc < 3) save_for_ever(argv[1], found);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "checkpoint_probe: %s\n", error.what_without_backtrace());
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "checkpoint_probe: %s\n", error.what());
    return 1;
  }
  return 0;
}
