// Joins the world that its environment describes, sums 1 + rank over all ranks and prints the
// result. With an argument, it then fails with that as the message of an error of LibTorch.

#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>
#include <exception>

int main(int argc, char** argv) {
  try {
    const auto world = tessera::init();
    const torch::Tensor sum = torch::full({4}, 1.0 + world.rank());
    world.process_group()->all_reduce(sum, tessera::ReduceOp::kSum, {"probe"})->wait();
    std::printf("rank %d of %d, local rank %d, started by %s, sum %.0f, over %s\n", world.rank(),
                world.size(), world.local_rank(), world.info().source.c_str(),
                sum[3].item<double>(), world.process_group()->backend_name().c_str());
    world.process_group()->barrier({"probe"});
    TORCH_CHECK(argc == 1, argv[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "world_probe: %s\n", error.what());
    return 1;
  }
  return 0;
}
