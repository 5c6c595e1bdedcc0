#include "benchmarks/workload.h"

#include <tessera/engine/activation_checkpoint.h>

#include <cmath>
#include <map>

namespace tessera::tools {

template <class Block>
torch::Tensor BenchModel::pass(Block& block, const torch::Tensor& x) {
  const auto y = switches_.checkpoint ? checkpoint(block, x) : block(x);
  return switches_.dropout ? torch::dropout(y, 0.1, is_training()) : y;
}

namespace {

namespace nn = torch::nn;
using torch::Tensor;

constexpr int64_t kVocabulary = 256;
constexpr int64_t kLength = 128;
constexpr int64_t kMlpWidth = 1024;
constexpr int64_t kMlpLayers = 12;
constexpr int64_t kMlpBatch = 64;

struct GptSize {
  int64_t layers, width, heads, batch, parameters;
};

const std::map<std::string, GptSize> kGpts = {
    {"tiny", {2, 128, 2, 4, 478'720}},
    {"small", {6, 384, 6, 4, 10'893'312}},
    {"medium", {8, 768, 12, 2, 57'196'032}},
};
constexpr int64_t kMlpParameters = 12'595'200;

struct AttentionImpl : nn::Module {
  AttentionImpl(int64_t width, int64_t heads)
      : qkv(register_module("qkv", nn::Linear(width, 3 * width))),
        proj(register_module("proj", nn::Linear(width, width))),
        heads(heads) {}

  Tensor forward(const Tensor& x) {
    const auto rows = x.size(0), length = x.size(1), width = x.size(2);
    auto parts = qkv(x).split(width, 2);
    for (auto& part : parts) {
      part = part.view({rows, length, heads, width / heads}).transpose(1, 2);
    }
    const auto mixed = torch::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0,
                                                           /*is_causal=*/true);
    return proj(mixed.transpose(1, 2).reshape({rows, length, width}));
  }

  nn::Linear qkv, proj;
  int64_t heads;
};
TORCH_MODULE(Attention);

struct BlockImpl : nn::Module {
  BlockImpl(int64_t width, int64_t heads)
      : ln1(register_module("ln1", nn::LayerNorm(nn::LayerNormOptions({width})))),
        attn(register_module("attn", Attention(width, heads))),
        ln2(register_module("ln2", nn::LayerNorm(nn::LayerNormOptions({width})))),
        fc(register_module("fc", nn::Linear(width, 4 * width))),
        out(register_module("out", nn::Linear(4 * width, width))) {}

  Tensor forward(Tensor x) {
    x = x + attn(ln1(x));
    return x + out(torch::gelu(fc(ln2(x))));
  }

  nn::LayerNorm ln1;
  Attention attn;
  nn::LayerNorm ln2;
  nn::Linear fc, out;
};
TORCH_MODULE(Block);

class Gpt : public BenchModel {
 public:
  Gpt(const GptSize& size, const LoopSwitches& switches)
      : BenchModel(switches),
        tok_(register_module("tok", nn::Embedding(kVocabulary, size.width))),
        pos_(register_module("pos", nn::Embedding(kLength, size.width))),
        blocks_(register_module("blocks", nn::ModuleList())),
        ln_f_(register_module("ln_f", nn::LayerNorm(nn::LayerNormOptions({size.width})))),
        head_(register_module("head",
                              nn::Linear(nn::LinearOptions(size.width, kVocabulary).bias(false)))) {
    for (int64_t i = 0; i < size.layers; ++i) blocks_->push_back(Block(size.width, size.heads));
  }

  Tensor loss(const Batch& batch) override {
    auto x = tok_(batch.inputs) + pos_(torch::arange(batch.inputs.size(1)));
    for (const auto& module : *blocks_) {
      Block block(std::static_pointer_cast<BlockImpl>(module));
      x = pass(block, x);
    }
    const auto logits = head_(ln_f_(x)).to(torch::kFloat);
    return torch::cross_entropy_loss(logits.view({-1, kVocabulary}), batch.targets.reshape({-1}));
  }

 private:
  nn::Embedding tok_, pos_;
  nn::ModuleList blocks_;
  nn::LayerNorm ln_f_;
  nn::Linear head_;
};

class Mlp : public BenchModel {
 public:
  explicit Mlp(const LoopSwitches& switches)
      : BenchModel(switches), layers_(register_module("layers", nn::ModuleList())) {
    for (int64_t i = 0; i < kMlpLayers; ++i) layers_->push_back(nn::Linear(kMlpWidth, kMlpWidth));
  }

  Tensor loss(const Batch& batch) override {
    auto x = batch.inputs.to(layers_->at<nn::LinearImpl>(0).weight.scalar_type());
    for (const auto& module : *layers_) {
      auto block = [layer = std::static_pointer_cast<nn::LinearImpl>(module)](const Tensor& input) {
        return torch::gelu(layer->forward(input));
      };
      x = pass(block, x);
    }
    return torch::mse_loss(x.to(torch::kFloat), batch.targets);
  }

 private:
  nn::ModuleList layers_;
};

void set_initial_values(BenchModel& model, double deviation) {
  torch::NoGradGuard no_grad;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(1234);
  for (auto& parameter : model.named_parameters()) {
    if (parameter.value().dim() == 2) {
      parameter.value().normal_(0, deviation, generator);
    } else {
      parameter.value().fill_(parameter.key().ends_with("bias") ? 0 : 1);
    }
  }
}

void check_numel(const BenchModel& model, int64_t expected) {
  int64_t numel = 0;
  for (const auto& parameter : model.parameters()) numel += parameter.numel();
  TORCH_INTERNAL_ASSERT(numel == expected, "the workload has ", numel, " parameters");
}

}  // namespace

std::shared_ptr<BenchModel> make_bench_model(const std::string& workload,
                                             const LoopSwitches& switches) {
  std::shared_ptr<BenchModel> model;
  if (workload == "mlp") {
    model = std::make_shared<Mlp>(switches);
    check_numel(*model, kMlpParameters);
    set_initial_values(*model, std::sqrt(2.0 / kMlpWidth));
  } else {
    const auto& size = kGpts.at(workload);
    model = std::make_shared<Gpt>(size, switches);
    check_numel(*model, size.parameters);
    set_initial_values(*model, 0.02);
  }
  if (switches.bf16) model->to(torch::kBFloat16);
  return model;
}

const std::vector<std::string>& muon_exceptions() {
  static const std::vector<std::string> names = {"tok.*", "pos.*", "head.*"};
  return names;
}

BatchStream::BatchStream(std::string workload, int rank)
    : workload_(std::move(workload)),
      generator_(at::make_generator<at::CPUGeneratorImpl>(4321 + rank)) {}

Batch BatchStream::next() {
  if (workload_ == "mlp") {
    auto x = torch::randn({kMlpBatch, kMlpWidth}, generator_);
    auto y = torch::randn({kMlpBatch, kMlpWidth}, generator_);
    return {x, y};
  }
  const auto bytes = torch::randint(0, kVocabulary, {kGpts.at(workload_).batch, kLength + 1},
                                    generator_, torch::kLong);
  return {bytes.narrow(1, 0, kLength), bytes.narrow(1, 1, kLength)};
}

}  // namespace tessera::tools
