#include <tessera/tessera.h>
#include <torch/torch.h>

int main() {
  auto world = tessera::init();  // the ranks that torchrun, mpirun, srun or `tessera run` started
  torch::nn::Sequential model(torch::nn::Linear(64, 4096), torch::nn::Linear(4096, 1));
  auto sharded = tessera::fully_shard(model);  // in place; each rank keeps its share
  torch::optim::AdamW adamw(model->parameters(), torch::optim::AdamWOptions(1e-3));
  tessera::ShardedOptimizer optimizer(sharded, adamw);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    model->forward(torch::randn({32, 64})).square().mean().backward();
    optimizer.step();
  }
}
