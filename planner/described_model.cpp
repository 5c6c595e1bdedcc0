#include "planner/described_model.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/silu.h>
#include <fmt/format.h>
#include <tessera/engine/activation_checkpoint.h>
#include <torch/csrc/autograd/custom_function.h>

#include "engine/unit/layout.h"
#include "planner/paper_job.h"

namespace tessera {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The kernel that devices have for `rms_norm()`, and its derivative.
struct FusedRmsNorm : torch::autograd::Function<FusedRmsNorm> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& weight) {
    std::vector<int64_t> rows = x.sizes().vec();
    rows.back() = 1;
    context->save_for_backward({x, weight, at::empty(rows, x.options().dtype(at::kFloat))});
    return at::empty(x.sizes(), x.options());
  }
  static variable_list backward(AutogradContext* context, const variable_list&) {
    const auto saved = context->get_saved_variables();
    return {at::empty(saved[0].sizes(), saved[0].options()),
            at::empty(saved[1].sizes(), saved[1].options())};
  }
};

}  // namespace

at::Tensor DescribedModel::add(const std::string& name, at::IntArrayRef sizes) {
  parameters_.push_back({name, paper_parameter(sizes, dtype_)});
  return parameters_.back().tensor;
}

// A layer's weight is stored with the outputs first, but for gpt2's.
DescribedModel::Layer DescribedModel::add_linear(const std::string& name, int64_t in, int64_t out,
                                                 bool bias) {
  Layer layer{add(name + ".weight",
                  config_.is_gpt2() ? at::IntArrayRef{in, out} : at::IntArrayRef{out, in})};
  if (bias) layer.bias = add(name + ".bias", {out});
  return layer;
}

DescribedModel::Layer DescribedModel::add_norm(const std::string& name, int64_t width) {
  Layer layer{add(name + ".weight", {width})};
  if (config_.is_gpt2()) layer.bias = add(name + ".bias", {width});
  return layer;
}

DescribedModel::Block DescribedModel::add_gpt2_block(const std::string& name) {
  const int64_t width = config_.width;
  Block block;
  block.norm1 = add_norm(name + "ln_1", width);
  block.qkv = {add_linear(name + "attn.c_attn", width, 3 * width, true)};
  block.output = add_linear(name + "attn.c_proj", width, width, true);
  block.norm2 = add_norm(name + "ln_2", width);
  block.in = {add_linear(name + "mlp.c_fc", width, config_.hidden, true)};
  block.out = add_linear(name + "mlp.c_proj", config_.hidden, width, true);
  return block;
}

DescribedModel::Block DescribedModel::add_llama_block(const std::string& name) {
  const auto& [width, hidden, mlp_bias] = std::tie(config_.width, config_.hidden, config_.mlp_bias);
  const int64_t queries = config_.heads * config_.head_dim;
  const int64_t keys = config_.kv_heads * config_.head_dim;
  const std::string attention = name + "self_attn.", mlp = name + "mlp.";
  Block block;
  block.qkv = {add_linear(attention + "q_proj", width, queries, config_.qkv_bias),
               add_linear(attention + "k_proj", width, keys, config_.qkv_bias),
               add_linear(attention + "v_proj", width, keys, config_.qkv_bias)};
  block.output = add_linear(attention + "o_proj", queries, width, config_.output_bias);
  if (config_.head_norms)
    block.head_norms = {add_norm(attention + "q_norm", config_.head_dim),
                        add_norm(attention + "k_norm", config_.head_dim)};
  block.in = {add_linear(mlp + "gate_proj", width, hidden, mlp_bias),
              add_linear(mlp + "up_proj", width, hidden, mlp_bias)};
  block.out = add_linear(mlp + "down_proj", hidden, width, mlp_bias);
  block.norm1 = add_norm(name + "input_layernorm", width);
  block.norm2 = add_norm(name + "post_attention_layernorm", width);
  return block;
}

DescribedModel::DescribedModel(const TransformerConfig& config, at::ScalarType dtype)
    : config_(config), dtype_(dtype) {
  const bool is_gpt2 = config.is_gpt2();
  const std::string body = is_gpt2 ? "transformer." : "model.";
  tokens_ = add(body + (is_gpt2 ? "wte.weight" : "embed_tokens.weight"),
                {config.vocabulary, config.width});
  if (is_gpt2) positions_ = add(body + "wpe.weight", {config.positions, config.width});
  for (int64_t i = 0; i < config.layers; ++i)
    blocks_.push_back(is_gpt2 ? add_gpt2_block(fmt::format("{}h.{}.", body, i))
                              : add_llama_block(fmt::format("{}layers.{}.", body, i)));
  norm_ = add_norm(body + (is_gpt2 ? "ln_f" : "norm"), config.width);
  if (config.tied_head) {
    head_ = tokens_;
    parameters_.push_back({"lm_head.weight", head_});
  } else {
    head_ = add("lm_head.weight", {config.vocabulary, config.width});
  }
}

// A forward of a batch.
class DescribedForward {
 public:
  DescribedForward(const DescribedModel& model, const ActivationOptions& options)
      : model_(model), config_(model.config_), options_(options) {}

  at::Tensor logits(const at::Tensor& ids) {
    at::Tensor x = at::embedding(model_.tokens_, ids);
    if (config_.is_gpt2())
      x = dropped(x + at::embedding(model_.positions_, at::empty({ids.size(1)}, ids.options())),
                  config_.dropout);
    for (const Block& block : model_.blocks_) {
      const auto run = [self = *this, &block](const at::Tensor& input) {
        return self.pass(block, input);
      };
      x = options_.checkpoint ? checkpoint(run, x) : run(x);
    }
    return linear(norm(x, model_.norm_), {model_.head_}, /*outputs_last=*/false);
  }

 private:
  using Layer = DescribedModel::Layer;
  using Block = DescribedModel::Block;

  // Autocast knows no meta tensors.
  at::Tensor cast(const at::Tensor& tensor) const {
    return options_.autocast && tensor.defined() ? tensor.to(*options_.autocast) : tensor;
  }

  at::Tensor linear(const at::Tensor& x, const Layer& layer, bool outputs_last) const {
    const at::Tensor input = cast(x), weight = cast(layer.weight), bias = cast(layer.bias);
    if (!outputs_last) return at::linear(input, weight, bias);
    return at::addmm(bias, input.flatten(0, 1), weight).view({x.size(0), x.size(1), -1});
  }
  at::Tensor linear(const at::Tensor& x, const Layer& layer) const {
    return linear(x, layer, config_.is_gpt2());
  }

  at::Tensor norm(const at::Tensor& x, const Layer& layer) const {
    if (config_.is_gpt2()) return at::layer_norm(x, layer.weight.sizes(), layer.weight, layer.bias);
    const bool is_fused = !options_.on_cpu && x.scalar_type() == layer.weight.scalar_type();
    return is_fused ? FusedRmsNorm::apply(x, layer.weight)
                    : at::rms_norm(x, layer.weight.sizes(), layer.weight, 1e-6);
  }

  // On the CPU, the mask has the input's dtype.
  at::Tensor dropped(const at::Tensor& x, double share) const {
    if (share == 0) return x;
    return x * at::empty(x.sizes(), options_.on_cpu ? x.options() : x.options().dtype(at::kBool));
  }

  at::Tensor turned(const at::Tensor& x) const {
    const auto parts = x.chunk(2, 3);
    return x * model_.cos_ + at::cat({-parts[1], parts[0]}, 3) * model_.sin_;
  }

  at::Tensor attention(const Block& block, const at::Tensor& x) const {
    const auto heads = [&](const at::Tensor& y) {
      return y.view({x.size(0), x.size(1), -1, config_.head_dim});
    };
    at::Tensor q, k, v;
    if (config_.is_gpt2()) {
      const auto parts = linear(x, block.qkv[0]).chunk(3, 2);
      q = heads(parts[0]).transpose(1, 2), k = heads(parts[1]).transpose(1, 2);
      v = heads(parts[2]).transpose(1, 2);
    } else {
      q = heads(linear(x, block.qkv[0])), k = heads(linear(x, block.qkv[1]));
      v = heads(linear(x, block.qkv[2])).transpose(1, 2);
      if (config_.head_norms) q = norm(q, block.head_norms[0]), k = norm(k, block.head_norms[1]);
      q = turned(q.transpose(1, 2)), k = turned(k.transpose(1, 2));
    }
    const at::Tensor mixed = attend(cast(q), cast(k), cast(v)).transpose(1, 2);
    return linear(mixed.reshape({x.size(0), x.size(1), -1}), block.output);
  }

  // Without a mask, of which nothing is kept.
  at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const {
    if (!keeps_scores(config_, options_))
      return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0, true));
    const auto for_all_heads = [&](const at::Tensor& x) {
      const int64_t times = config_.heads / config_.kv_heads;
      return times == 1 ? x : x.repeat_interleave(times, 1);
    };
    const at::Tensor scores = at::matmul(q * 0.5, (for_all_heads(k) * 0.5).transpose(2, 3));
    return at::matmul(dropped(scores.softmax(3), config_.attention_dropout), for_all_heads(v));
  }

  at::Tensor feed_forward(const Block& block, const at::Tensor& x) const {
    const at::Tensor in = linear(x, block.in[0]);
    return linear(config_.is_gpt2() ? at::gelu(in) : at::silu(in) * linear(x, block.in[1]),
                  block.out);
  }

  at::Tensor pass(const Block& block, const at::Tensor& input) const {
    const double share = config_.dropout;
    const at::Tensor x = input + dropped(attention(block, norm(input, block.norm1)), share);
    return x + dropped(feed_forward(block, norm(x, block.norm2)), share);
  }

  const DescribedModel& model_;
  const TransformerConfig& config_;
  const ActivationOptions& options_;
};

at::Tensor DescribedModel::loss(const ActivationOptions& options, at::Tensor& logits) {
  if (!config_.is_gpt2() && !cos_.defined()) {
    const auto inside = at::device(at::kMeta).dtype(options.autocast.value_or(dtype_));
    cos_ = at::empty({options.sequence, config_.head_dim}, inside);
    sin_ = at::empty({options.sequence, config_.head_dim}, inside);
  }
  const auto indices = at::device(at::kMeta).dtype(at::kLong);
  const at::Tensor ids = at::empty({options.batch, options.sequence}, indices);
  const at::Tensor targets = at::empty({options.batch * options.sequence}, indices);
  logits = DescribedForward(*this, options).logits(ids).flatten(0, 1);
  return at::cross_entropy_loss(logits.to(at::kFloat), targets);
}

std::vector<ParameterSize> parameter_sizes(const TransformerConfig& config) {
  return parameter_sizes(DescribedModel(config, config.dtype).parameters());
}

}  // namespace tessera
