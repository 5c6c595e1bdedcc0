#pragma once

// Declarations that the documents' snippets use without showing them: a user's model, data and
// loop. They are compiled and linked as a check; nothing of this runs. No header is included here:
// the programs of the documents include the headers that they and this file need.
namespace snippets {

namespace dist = tessera::paddle;

/// Stands for an object that exists already.
template <class T>
T& some() {
  std::abort();
}

struct Net : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x; }
  template <class Batch>
  at::Tensor loss(const Batch&) {
    return {};
  }
};
struct Gpt : Net {
  explicit Gpt(int64_t width) {}
};
struct Mlp : Net {
  torch::nn::Linear up = nullptr, down = nullptr;
};
struct Layers : torch::nn::Module {
  std::vector<torch::nn::Linear> blocks;
  torch::nn::Linear head = nullptr;
};

inline at::Tensor loss_of(const at::Tensor& output) { return output; }
inline auto make_dataset() { return some<torch::data::datasets::MNIST>(); }
template <class... Arguments>
void train(Arguments&&...) {}

inline auto& net = some<std::shared_ptr<Net>>();
inline auto& model = some<std::shared_ptr<Net>>();
inline auto& mlp = some<std::shared_ptr<Mlp>>();
inline auto& blocks = some<std::vector<torch::nn::Linear>>();
inline auto& sharded = some<tessera::Sharded<Net>>();
inline auto& adamw = some<torch::optim::AdamW>();
inline auto& optimizer = some<tessera::ShardedOptimizer>();
inline auto& encoder = some<tessera::StateDict>();
inline auto& decoder = some<tessera::StateDict>();
inline auto& plan = some<tessera::ShardPlan>();
inline auto& inside = some<tessera::ProcessGroupPtr>();
inline auto& across = some<tessera::ProcessGroupPtr>();
inline auto& x = some<at::Tensor>();
inline auto& options = some<int64_t>();
inline auto& generator = some<tessera::Sharded<Net>>();
inline auto& critic = some<tessera::Sharded<Net>>();
inline auto& for_generator = some<tessera::ShardedOptimizer>();
inline auto& for_critic = some<tessera::ShardedOptimizer>();
inline auto& average = some<tessera::ExponentialAverage>();
inline double loss_sum, examples, accuracy, loss, lr;
inline double evaluate(const Net&) { return 0; }
inline auto& step = some<int>();

namespace in_shard_layer {
inline auto& optimizer = some<tessera::DistOptimizer>();
}

}  // namespace snippets
