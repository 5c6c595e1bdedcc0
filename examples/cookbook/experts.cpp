// A mixture of experts: each rank holds some of them, and tokens travel to theirs.
//   ./dev example cookbook/experts
// All ranks train on batches of their own. Each part of the experts is shared by --copies ranks,
// over which it is sharded; everything else is sharded over all ranks.
#include <fmt/format.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <fstream>

namespace nn = torch::nn;
using torch::Tensor;

constexpr int64_t kContext = 8, kWidth = 32, kHidden = 64, kBlocks = 2;

// Each token goes through the expert that a router finds best, and a share of it comes back.
struct MixtureImpl : nn::Module {
  explicit MixtureImpl(int64_t experts) : experts(experts) {
    const auto uniform = [&](int64_t rows, int64_t columns) {
      return (torch::rand({experts, rows, columns}) * 2 - 1) / std::sqrt(rows);
    };
    router = register_module("router", nn::Linear(kWidth, experts));
    up = register_parameter("up", uniform(kWidth, kHidden));
    down = register_parameter("down", uniform(kHidden, kWidth));
  }

  // Leaves this rank its part of the experts. The ranks of the mesh have one part each.
  void cut(const tessera::DeviceMesh& mesh) {
    tessera::distribute_(up, mesh, {tessera::Shard{0}});
    tessera::distribute_(down, mesh, {tessera::Shard{0}});
    ranks = mesh.process_group();
  }

  Tensor forward(const Tensor& x) {
    const auto [share, expert] = torch::softmax(router(x), -1).max(-1);
    const auto order = torch::argsort(expert, /*stable=*/true, 0);
    const auto sorted = expert.index_select(0, order);
    // Those of each part lie side by side, and so do those of each expert.
    const int64_t local = experts / ranks->size();
    const auto counts = torch::bincount(torch::floor_divide(sorted, local), {}, ranks->size());
    const auto* const first = counts.const_data_ptr<int64_t>();
    const std::vector<int64_t> sent(first, first + ranks->size());
    const auto received = tessera::exchange_split_sizes(sent, ranks);
    const auto tokens = tessera::all_to_all_single(x.index_select(0, order), received, sent, ranks);
    const auto ids = tessera::all_to_all_single(sorted.remainder(local), received, sent, ranks);
    const auto own_up = part(up), own_down = part(down);
    auto results = torch::zeros_like(tokens);
    for (int64_t i = 0; i < local; ++i) {
      const auto rows = ids.eq(i).nonzero().squeeze(1);
      const auto hidden = torch::relu(tokens.index_select(0, rows).matmul(own_up[i]));
      results = results.index_add(0, rows, hidden.matmul(own_down[i]));
    }
    const auto back = tessera::all_to_all_single(results, sent, received, ranks);
    return torch::zeros_like(x).index_copy(0, order, back) * share.unsqueeze(-1);
  }
  static Tensor part(const Tensor& weight) {
    return tessera::is_dist(weight) ? tessera::to_local(weight) : weight;
  }

  const int64_t experts;
  nn::Linear router = nullptr;
  Tensor up, down;
  tessera::ProcessGroupPtr ranks = tessera::single_process_group();
};
TORCH_MODULE(Mixture);

struct NetImpl : nn::Module {
  explicit NetImpl(int64_t experts) {
    for (int64_t i = 0; i < kBlocks; ++i) {
      norms->push_back(nn::LayerNorm(nn::LayerNormOptions({kWidth})));
      mixtures->push_back(Mixture(experts));
    }
  }
  Tensor loss(const Tensor& windows) {  // of each window's last byte by those before it
    auto x = mix(embedding(windows.slice(1, 0, -1)).flatten(1));
    for (int64_t i = 0; i < kBlocks; ++i)
      x = x + mixtures[i]->as<MixtureImpl>()->forward(norms[i]->as<nn::LayerNorm>()->forward(x));
    return torch::cross_entropy_loss(head(x), windows.select(1, -1));
  }
  nn::Embedding embedding = register_module("embedding", nn::Embedding(256, kWidth));
  nn::Linear mix = register_module("mix", nn::Linear(kContext* kWidth, kWidth));
  nn::ModuleList norms = register_module("norms", nn::ModuleList()),
                 mixtures = register_module("mixtures", nn::ModuleList());
  nn::Linear head = register_module("head", nn::Linear(kWidth, 256));
};
TORCH_MODULE(Net);

int main(int argc, char** argv) {
  std::string data = "data/corpus.txt", runs = "runs/experts";
  int64_t steps = 200, batch = 64, save_every = 100, experts = 4, copies = 0;
  bool in_double = false;
  CLI::App app{"Trains a mixture of experts"};
  app.add_option("--data", data, "text to learn from")->check(CLI::ExistingFile);
  app.add_option("--runs", runs, "directory of checkpoints and logs");
  app.add_option("--steps", steps, "in all")->check(CLI::PositiveNumber);
  app.add_option("--save-every", save_every)->check(CLI::PositiveNumber);
  app.add_option("--batch", batch, "windows per step, in all")->check(CLI::PositiveNumber);
  app.add_option("--experts", experts, "of each layer")->check(CLI::PositiveNumber);
  app.add_option("--copies", copies, "ranks with the same experts (default: half of the ranks)");
  app.add_flag("--double", in_double, "compute in double: losses are then those of one process");
  CLI11_PARSE(app, argc, argv);
  std::ifstream file(data, std::ios::binary);
  const std::vector<uint8_t> text((std::istreambuf_iterator<char>(file)), {});
  const auto bytes = torch::tensor(text, torch::kByte);
  TORCH_CHECK_VALUE(bytes.numel() > kContext + 1, "[experts] --data must have more than ",
                    kContext + 1, " bytes");

  const auto world = tessera::init();
  if (copies == 0) copies = std::max(1, world.size() / 2);
  TORCH_CHECK_VALUE(world.size() % copies == 0 && experts % (world.size() / copies) == 0 &&
                        batch % world.size() == 0,
                    "[experts] the ranks must be a multiple of --copies, --experts of the parts, "
                    "and --batch of the ranks; got ",
                    world.size(), " ranks, ", copies, " copies, ", experts, " experts, batch ",
                    batch);
  const auto mesh =
      tessera::DeviceMesh::over_world({copies, world.size() / copies}, {"copies", "parts"});
  tessera::manual_seed(1);
  Net net(experts);
  if (in_double) net->to(torch::kDouble);
  for (const auto& mixture : *net->mixtures)
    mixture->as<MixtureImpl>()->cut(mesh.sub_mesh("parts"));
  const auto shared = mesh.process_group(mesh.dim("copies"));
  tessera::ShardPlan plan;
  plan.groups = {{"mixtures.*.up", shared}, {"mixtures.*.down", shared}};
  auto model = tessera::fully_shard(net, plan);
  torch::optim::AdamW adamw(net->parameters(), torch::optim::AdamWOptions(3e-3));
  tessera::ShardedOptimizer optimizer(model, adamw);

  int64_t step = 0;
  if (const auto latest = tessera::latest_checkpoint(runs))
    step = static_cast<int64_t>(
        tessera::load_checkpoint(*latest, model, &optimizer).numbers.at("step"));
  tessera::MetricsLog log(runs, {.first_step = step + 1});
  tessera::ProgressLine progress(steps);
  while (step < steps) {
    // All ranks draw the windows of all, whatever the number of ranks, and take their own.
    tessera::manual_seed(1000 + step);
    const auto begin = torch::randint(bytes.numel() - kContext, {batch, 1});
    const auto windows = bytes.index({begin + torch::arange(kContext + 1)}).to(torch::kLong);
    optimizer.zero_grad();
    const auto loss = net->loss(windows.chunk(world.size())[world.rank()]);
    loss.backward();
    optimizer.clip_grad_norm_(1);
    optimizer.step();
    const double mean = tessera::mean_over_ranks(loss.item<double>());
    log.write(++step, {{"loss", mean}});
    progress.show(step, fmt::format("loss {:.3f}", mean));
    if (step % save_every == 0 || step == steps)
      tessera::save_checkpoint(fmt::format("{}/step-{}", runs, step), model, &optimizer,
                               {.numbers = {{"step", double(step)}}, .keep_last = 2});
  }
  const auto memory = optimizer.memory();
  fmt::print("rank {} keeps {} bytes of parameters and {} of optimizer state\n", world.rank(),
             memory.parameters, memory.optimizer_state);
}
