#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "base/files/untrusted.h"
#include "planner/transformer_names.h"

namespace tessera {
namespace {

// [Note: What autograd keeps]
//
// Written for each operator of a block: the tensors that LibTorch saves for its backward (see
// derivatives.yaml there), each storage once, though several operators save it. `x` is what goes
// from block to block, `n` the output of a norm, `F` the elements of a token inside the
// feed-forward part. Views save nothing of their own: heads, transposed results of attention, parts
// of gpt2's joint queries, keys and values. Sums save nothing, nor do products with tables that
// need no gradient (rotary positions). docs/design/step_memory.md has the same as a table.

constexpr int64_t kStatistic = 4;          // bytes of a number that norms and softmax keep: float32
constexpr int64_t kToken = 8;              // of a token's index: int64
constexpr int64_t kGeneratorState = 5056;  // which a checkpoint keeps of the CPU's generator
constexpr int64_t kMostTokens = int64_t{1} << 40, kMostKept = int64_t{1} << 56;

int64_t item_of(at::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

// The bytes of activations of one block and of the ends of the model.
class ActivationSizes {
 public:
  ActivationSizes(const TransformerConfig& config, const ActivationOptions& options)
      : config_(config),
        options_(options),
        tokens_(options.batch * options.sequence),
        x_(item_of(options.dtype)),
        n_(item_of(options.autocast.value_or(options.dtype))),
        queries_(config.heads * config.head_dim),
        keys_(config.kv_heads * config.head_dim) {}

  // Bytes of so many elements for each token, of the dtype between blocks and of that inside.
  int64_t between(int64_t elements) const { return tokens(elements, x_); }
  int64_t inside(int64_t elements) const { return tokens(elements, n_); }
  int64_t tokens(int64_t elements, int64_t item) const {
    const int64_t nbytes = checked_product(tokens_, checked_product(elements, item));
    TORCH_CHECK_VALUE(nbytes <= kMostKept, "[activation_moments] a tensor must have at most ",
                      kMostKept, " bytes; a batch of ", options_.batch, " and a sequence of ",
                      options_.sequence, " make one of ", nbytes);
    return nbytes;
  }
  int64_t x() const { return between(config_.width); }
  int64_t hidden() const { return inside(config_.hidden); }
  int64_t queries() const { return inside(queries_); }
  int64_t keys() const { return inside(keys_); }
  bool casts() const { return x_ != n_; }

  // Of a norm of `rows` rows for each token, whose input has `width` elements: the input, and what
  // is kept besides.
  int64_t norm(int64_t width, int64_t rows, int64_t item) const {
    const int64_t input = tokens(width, item);
    if (config_.is_gpt2()) return input + tokens(2 * rows, kStatistic);  // mean and deviation
    if (!options_.on_cpu && item == x_) return input + tokens(rows, kStatistic);
    // Composed on the CPU, and where the input is narrower than the weight: the input in float32,
    // and the result before it is scaled.
    return 2 * tokens(width, kStatistic) + tokens(rows, kStatistic);
  }
  // A norm's result as the input of so many layers: autocast makes each a copy.
  int64_t normed(size_t layers) const {
    return inside(config_.width) * (casts() ? static_cast<int64_t>(layers) : 1);
  }
  // One row of softmax for each token and head.
  int64_t scores() const { return tokens(checked_product(config_.heads, options_.sequence), n_); }
  int64_t mask() const {
    if (config_.dropout == 0) return 0;
    return options_.on_cpu ? between(config_.width) : tokens(config_.width, 1);
  }

  int64_t kept_by_attention(size_t layers) const {
    int64_t kept = norm(config_.width, 1, x_) + normed(layers) + mask();
    if (config_.head_norms)
      kept += norm(queries_, config_.heads, n_) + norm(keys_, config_.kv_heads, n_);
    const int64_t result = queries();
    if (options_.fused_attention)
      return kept + queries() + 2 * keys() + result + tokens(config_.heads, kStatistic);
    // Scaled queries and keys, and keys and values repeated for all heads.
    return kept + 3 * queries() + result + scores();
  }
  int64_t kept_by_mlp(size_t layers) const {
    return norm(config_.width, 1, x_) + normed(layers) + mask() + inner() * hidden();
  }
  // Tensors of the hidden width that are kept.
  int64_t inner() const { return config_.is_gpt2() ? 2 : 4; }

  int64_t logits() const { return inside(config_.vocabulary); }
  int64_t wide_logits() const { return tokens(config_.vocabulary, kStatistic); }
  bool widens_logits() const { return n_ != kStatistic; }

 private:
  const TransformerConfig& config_;
  const ActivationOptions& options_;
  const int64_t tokens_, x_, n_, queries_, keys_;
};

// Goes through a step and writes down the moments.
class MomentList {
 public:
  MomentList(const TransformerConfig& config, const ActivationOptions& options)
      : config_(config), options_(options), sizes_(config, options) {
    for (const ParameterSize& parameter : parameter_sizes(config)) {
      int64_t numel = 1;
      for (const int64_t size : parameter.shape) numel *= size;
      numel_.emplace(parameter.names.front(), numel);
    }
  }

  std::vector<ActivationMoment> list() {
    check_total();
    embed();
    for (int64_t layer = 0; layer < config_.layers; ++layer) forward_block(layer);
    forward_head();
    backward_head();
    for (int64_t layer = config_.layers; layer-- > 0;) backward_block(layer);
    backward_embedding();
    return std::move(moments_);
  }

 private:
  using Names = std::vector<std::string>;

  // Leaves room for the sums.
  void check_total() const {
    const BlockNames block = block_names(config_, 0);
    const int64_t blocks =
        checked_product(config_.layers, kept_by_attention(block) + kept_by_mlp(block));
    TORCH_CHECK_VALUE(blocks <= kMostKept, "[activation_moments] activations must have at most ",
                      kMostKept, " bytes; got a batch of ", options_.batch, " and a sequence of ",
                      options_.sequence, " for ", config_.layers, " layers");
  }

  // The parameters of layers that the model has.
  Names parameters_of(const Names& layers) const {
    Names names;
    for (const std::string& layer : layers)
      for (const char* part : {".weight", ".bias"})
        if (numel_.contains(layer + part)) names.push_back(layer + part);
    return names;
  }
  Names attention_layers(const BlockNames& block) const {
    Names layers = {block.norm1};
    layers.insert(layers.end(), block.qkv.begin(), block.qkv.end());
    layers.insert(layers.end(), block.head_norms.begin(), block.head_norms.end());
    layers.push_back(block.output);
    return layers;
  }
  Names mlp_layers(const BlockNames& block) const {
    Names layers = {block.norm2};
    layers.insert(layers.end(), block.in.begin(), block.in.end());
    layers.push_back(block.out);
    return layers;
  }
  // Copies of weights in the dtype of autocast, which backward reads.
  int64_t cast_weights(Names layers, const std::string& last) const {
    if (!sizes_.casts()) return 0;
    layers.push_back(last);
    int64_t numel = 0;
    for (const std::string& layer : layers) numel += numel_.at(layer + ".weight");
    return numel * item_of(*options_.autocast);
  }

  void forward(const std::string& name, const Names& layers, int64_t more) {
    moments_.push_back({"forward of " + name, false, parameters_of(layers), {}, live_ + more});
  }
  void backward(const std::string& name, const Names& layers, int64_t more) {
    Names parameters = parameters_of(layers);
    std::reverse(parameters.begin(), parameters.end());
    moments_.push_back(
        {"backward of " + name, true, parameters, parameters, live_ + more + tied_gradient_});
  }

  void embed() {
    live_ = sizes_.tokens(1, kToken) + sizes_.tokens(1, kToken);  // tokens and targets
    moments_.push_back({"forward of the embedding",
                        false,
                        model_names(config_).embeddings,
                        {},
                        live_ + 2 * sizes_.x()});
    live_ += sizes_.mask();
  }

  int64_t kept_by_attention(const BlockNames& block) const {
    return sizes_.kept_by_attention(block.qkv.size()) + cast_weights(block.qkv, block.output);
  }
  int64_t kept_by_mlp(const BlockNames& block) const {
    return sizes_.kept_by_mlp(block.in.size()) + cast_weights(block.in, block.out);
  }
  // Of a block's input, which the block before has made, a checkpoint keeps nothing more.
  int64_t kept_by_checkpoint() const {
    return sizes_.x() + (options_.on_cpu ? kGeneratorState : 0);
  }

  void forward_block(int64_t layer) {
    const BlockNames block = block_names(config_, layer);
    const int64_t before = live_;
    live_ += kept_by_attention(block);
    forward(fmt::format("layer {}: attention", layer), attention_layers(block), sizes_.x());
    live_ += kept_by_mlp(block);
    forward(fmt::format("layer {}: feed-forward", layer), mlp_layers(block), sizes_.x());
    if (options_.checkpoint) live_ = before + kept_by_checkpoint();
  }

  void forward_head() {
    const ModelNames names = model_names(config_);
    live_ += sizes_.norm(config_.width, 1, item_of(options_.dtype)) + sizes_.normed(1);
    if (sizes_.casts()) live_ += numel_of_head() * item_of(*options_.autocast);
    live_ += sizes_.logits();
    Names parameters = parameters_of({names.norm});
    parameters.push_back(head());
    moments_.push_back({"forward of the output layer", false, parameters, {}, live_});
    const int64_t copy = sizes_.widens_logits() ? sizes_.wide_logits() : 0;
    live_ += sizes_.wide_logits();  // log-softmax
    moments_.push_back({"forward of the loss", false, {}, {}, live_ + copy});
  }

  std::string head() const {
    return config_.tied_head ? model_names(config_).embeddings.front() : kHeadWeight;
  }
  int64_t numel_of_head() const { return config_.vocabulary * config_.width; }

  void backward_head() {
    const ModelNames names = model_names(config_);
    const int64_t wide = sizes_.wide_logits(), logits = sizes_.logits(), x = sizes_.x();
    // The gradients of the loss's two operators, in float32.
    moments_.push_back({"backward of the loss", true, {}, {}, live_ + 2 * wide});
    live_ -= wide;
    if (sizes_.widens_logits())
      moments_.push_back({"backward of the loss", true, {}, {}, live_ + wide + logits});
    // A tied weight's gradient waits in autograd for that of the embedding.
    if (config_.tied_head) tied_gradient_ = numel_of_head() * item_of(options_.dtype);
    moments_.push_back({"backward of the output layer",
                        true,
                        {head()},
                        config_.tied_head ? Names{} : Names{head()},
                        live_ + logits + sizes_.inside(config_.width) + tied_gradient_});
    live_ -= sizes_.normed(1);
    if (sizes_.casts()) live_ -= numel_of_head() * item_of(*options_.autocast);
    backward("the last norm", {names.norm}, 2 * x);
    live_ -= sizes_.norm(config_.width, 1, item_of(options_.dtype));
  }

  void backward_block(int64_t layer) {
    const BlockNames block = block_names(config_, layer);
    if (options_.checkpoint) {
      live_ += kept_by_attention(block) + kept_by_mlp(block) - kept_by_checkpoint();
      Names layers = attention_layers(block);
      for (const std::string& next : mlp_layers(block)) layers.push_back(next);
      moments_.push_back({fmt::format("second forward of layer {}", layer),
                          true,
                          parameters_of(layers),
                          {},
                          live_ + 2 * sizes_.x() + tied_gradient_});
    }
    backward_mlp(fmt::format("layer {}: feed-forward", layer), block);
    backward_attention(fmt::format("layer {}: attention", layer), block);
    if (options_.checkpoint && options_.on_cpu) live_ += kGeneratorState;
  }

  // Between the operators, the gradient of what the block returns is kept for its sum.
  void backward_mlp(const std::string& name, const BlockNames& block) {
    const int64_t x = sizes_.x(), hidden = sizes_.hidden();
    const int64_t dx = sizes_.inside(config_.width);
    const int64_t cast = sizes_.casts() ? dx : 0;
    const int64_t end = live_ - kept_by_mlp(block);
    backward(name, {block.out}, x + cast + hidden);
    live_ -= hidden;
    // Activation and product: what comes in, and a gradient for each input.
    const int64_t inputs = static_cast<int64_t>(block.in.size());
    backward(name, {}, x + (inputs + 1) * hidden);
    live_ -= (sizes_.inner() - 1) * hidden;
    backward(name, block.in, x + inputs * hidden + std::min<int64_t>(inputs, 2) * dx);
    backward(name, {block.norm2}, 3 * x);
    live_ = end;
  }

  void backward_attention(const std::string& name, const BlockNames& block) {
    const int64_t x = sizes_.x(), queries = sizes_.queries();
    const int64_t dx = sizes_.inside(config_.width);
    const int64_t qkv = queries + 2 * sizes_.keys();
    const int64_t end = live_ - kept_by_attention(block);
    backward(name, {block.output}, x + queries);
    const int64_t scores = options_.fused_attention ? 0 : 2 * sizes_.scores();
    backward(name, {}, x + queries + qkv + scores);
    live_ = end + sizes_.norm(config_.width, 1, item_of(options_.dtype)) +
            sizes_.normed(block.qkv.size()) + cast_weights(block.qkv, block.output);
    if (config_.is_gpt2() || config_.head_norms) backward(name, block.head_norms, x + 2 * qkv);
    backward(name, block.qkv, x + qkv + std::min<int64_t>(std::ssize(block.qkv), 2) * dx);
    backward(name, {block.norm1}, 3 * x);
    live_ = end;
  }

  // The sum of a tied weight's two gradients is a third tensor.
  void backward_embedding() {
    moments_.push_back({"backward of the embedding",
                        true,
                        {},
                        model_names(config_).embeddings,
                        live_ + sizes_.x() + 2 * tied_gradient_});
  }

  const TransformerConfig& config_;
  const ActivationOptions& options_;
  const ActivationSizes sizes_;
  std::map<std::string, int64_t> numel_;
  std::vector<ActivationMoment> moments_;
  int64_t live_ = 0;  // kept so far
  int64_t tied_gradient_ = 0;
};

void check_options(const TransformerConfig& config, const ActivationOptions& options) {
  TORCH_CHECK_VALUE(
      options.batch >= 1 && options.sequence >= 1,
      "[activation_moments] options.batch and options.sequence must be at least 1; got ",
      options.batch, " and ", options.sequence);
  TORCH_CHECK_VALUE(checked_product(options.batch, options.sequence) <= kMostTokens,
                    "[activation_moments] options.batch x options.sequence must be at most ",
                    kMostTokens, "; got ", options.batch, " x ", options.sequence);
  TORCH_CHECK_VALUE(!config.is_gpt2() || options.sequence <= config.positions,
                    "[activation_moments] options.sequence must be at most the ", config.positions,
                    " positions of the model; got ", options.sequence);
  if (!options.autocast) return;
  TORCH_CHECK_VALUE(item_of(*options.autocast) < item_of(options.dtype),
                    "[activation_moments] options.autocast must be narrower than the parameters' ",
                    c10::toString(options.dtype), "; got ", c10::toString(*options.autocast));
}

}  // namespace

std::vector<ActivationMoment> activation_moments(const TransformerConfig& config,
                                                 const ActivationOptions& options) {
  check_options(config, options);
  return MomentList(config, options).list();
}

}  // namespace tessera
