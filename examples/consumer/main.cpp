// Shards a tiny model and takes three steps. Started without a launcher it is a world of one.
#include <tessera/tessera.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include <cstdio>

int main() {
  auto world = tessera::init();
  tessera::manual_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(8, 16), torch::nn::ReLU(),
                              torch::nn::Linear(16, 1));
  auto sharded = tessera::fully_shard(model);
  torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1));
  tessera::ShardedOptimizer optimizer(sharded, sgd);

  const auto x = torch::randn({32, 8});
  const auto y = x.sum(1, /*keepdim=*/true);
  double first = 0.0;
  double last = 0.0;
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const auto loss = torch::mse_loss(model->forward(x), y);
    loss.backward();
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  std::printf("Tessera %d.%d.%d: loss %.4f -> %.4f on %d rank(s)\n", TESSERA_VERSION_MAJOR,
              TESSERA_VERSION_MINOR, TESSERA_VERSION_PATCH, first, last, world.size());
  return last < first ? 0 : 1;
}
