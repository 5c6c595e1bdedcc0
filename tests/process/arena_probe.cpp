// Trains a small model and prints the results.
//
//   arena_probe STEPS [die RANK STEP | late RANK | stay | exchange]
//
// Each rank prints "rank R over TRANSPORT", "rank R step S" after each step and, at the end, "rank
// R sum HEX" with the bits of a sum over all parameters. With `die`, RANK kills itself in STEP,
// between backward and step. With `late`, RANK comes to each backward after the others. With
// `stay`, all wait to be killed. With `exchange`, each sends all others messages of many lengths,
// and prints "rank R exchanged".

#include <signal.h>
#include <tessera/tessera.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

int value(char** arguments, int count, int index) {
  return index < count ? std::atoi(arguments[index]) : -1;
}

struct Mishap {
  int dying_rank = -1, last_step = -1;
  int late_rank = -1;
};

void train(const tessera::World& world, int steps, const Mishap& mishap) {
  tessera::manual_seed(5);
  auto model = torch::nn::Sequential(torch::nn::Linear(64, 512), torch::nn::GELU(),
                                     torch::nn::Linear(512, 512), torch::nn::GELU(),
                                     torch::nn::Linear(512, 8));
  torch::optim::AdamW inner(model->parameters());
  auto sharded = tessera::fully_shard(model.ptr());
  tessera::ShardedOptimizer optimizer(sharded, inner);
  tessera::manual_seed(100 + world.rank());
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    const auto loss = model->forward(torch::randn({16, 64})).pow(2).mean();
    if (world.rank() == mishap.late_rank) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    loss.backward();
    if (world.rank() == mishap.dying_rank && step == mishap.last_step) ::kill(::getpid(), SIGKILL);
    optimizer.step();
    std::printf("rank %d step %d\n", world.rank(), step);
    std::fflush(stdout);
  }
  double sum = 0;
  for (const auto& entry : sharded.full_state())
    sum += entry.tensor.to(torch::kDouble).sum().item<double>();
  std::printf("rank %d sum %a\n", world.rank(), sum);
}

void exchange(const tessera::World& world) {
  const int rank = world.rank(), size = world.size();
  const auto message = [](int sender, int receiver, int64_t numel) {
    return torch::arange(numel) * 7 + 10 * sender + receiver;
  };
  for (const int64_t numel : {1, 1000, 100'000, 3'000'000}) {
    std::vector<torch::Tensor> from, to;
    for (int r = 0; r < size; ++r) {
      to.push_back(message(rank, r, numel + r));
      from.push_back(torch::zeros({numel + rank}, torch::kInt64));
    }
    world.process_group()->all_to_all(from, std::move(to), {.subject = "probe"})->wait_inputs();
    for (int r = 0; r < size; ++r)
      TORCH_CHECK(torch::equal(from[r], message(r, rank, numel + rank)), "rank ", rank,
                  " got wrong ", numel, " of rank ", r);
  }
  std::printf("rank %d exchanged\n", rank);
}

}  // namespace

int main(int count, char** arguments) {
  try {
    const auto world = tessera::init();
    std::printf("rank %d over %s\n", world.rank(), world.process_group()->backend_name().c_str());
    std::fflush(stdout);
    const std::string mode = count > 2 ? arguments[2] : "";
    const int rank = value(arguments, count, 3);
    train(world, value(arguments, count, 1),
          {.dying_rank = mode == "die" ? rank : -1,
           .last_step = value(arguments, count, 4),
           .late_rank = mode == "late" ? rank : -1});
    if (mode == "exchange") exchange(world);
    if (mode == "stay") {
      std::printf("rank %d stays\n", world.rank());
      std::fflush(stdout);
      std::this_thread::sleep_for(std::chrono::minutes(2));
    }
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "arena_probe: %s\n", error.what_without_backtrace());
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "arena_probe: %s\n", error.what());
    return 1;
  }
  return 0;
}
