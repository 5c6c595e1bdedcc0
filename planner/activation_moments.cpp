#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/Allocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <tessera/comm/process_group.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "base/files/untrusted.h"
#include "engine/model/memory_count.h"
#include "planner/described_model.h"
#include "planner/moments_of_samples.h"

namespace tessera {
namespace {

// [Note: Activations of a described model]
//
// The model is run with meta tensors: LibTorch's autograd keeps what it keeps in a real step, and
// all that lacks is the memory. The bytes are those that an allocator counts, less those of the
// engine, as a `MemoryTracer` has them of real tensors.

constexpr int64_t kMostTokens = int64_t{1} << 40, kMostKept = int64_t{1} << 56;

// The bytes that meta tensors of a thread would have.
struct MetaBytes {
  int64_t now = 0, peak = 0;
};
thread_local std::shared_ptr<MetaBytes> counter;  // null: nobody counts

class MetaAllocator final : public c10::Allocator {
 public:
  at::DataPtr allocate(size_t nbytes) override {
    if (!counter) return {nullptr, at::kMeta};
    counter->now += static_cast<int64_t>(nbytes);
    counter->peak = std::max(counter->peak, counter->now);
    return {nullptr, new Block{counter, static_cast<int64_t>(nbytes)}, &free_block, at::kMeta};
  }
  at::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override {}

 private:
  struct Block {
    std::shared_ptr<MetaBytes> counter;
    int64_t nbytes;
  };
  static void free_block(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    block->counter->now -= block->nbytes;
  }
};

// Takes samples of the activations while it lives.
class MetaTracer final : public MemoryListener {
 public:
  explicit MetaTracer(ShardedState& state) : state_(state), held_(held()) {
    static MetaAllocator allocator;
    static std::once_flag once;
    std::call_once(once, [] { c10::SetAllocator(at::kMeta, &allocator, /*priority=*/1); });
    counter = std::make_shared<MetaBytes>(MetaBytes{.now = held_, .peak = held_});
    state.context().watch.add(*this);
  }
  ~MetaTracer() override {
    state_.context().watch.remove(*this);
    counter.reset();
  }

  const std::vector<MemorySample>& samples() const { return samples_; }

 private:
  int64_t held() const {
    int64_t nbytes = 0;
    for (size_t unit = 0; unit < state_.units().size(); ++unit)
      nbytes += held_by(state_, unit).total();
    return nbytes;
  }

  void note_peak() {
    peak_ = std::max(peak_, std::exchange(counter->peak, counter->now) - std::max(held_, held()));
  }
  // What is made before the event that follows is the engine's.
  void before_change() override {
    note_peak();
    is_changing_ = true;
  }
  void on_memory(MemoryEvent event, const std::string& unit) override {
    if (!std::exchange(is_changing_, false)) note_peak();
    counter->peak = counter->now;
    held_ = held();
    MemorySample& sample = samples_.emplace_back(MemorySample{.event = event, .unit = unit});
    sample.bytes.other = counter->now - held_;
    sample.peak_other = std::max(std::exchange(peak_, 0), sample.bytes.other);
  }

  ShardedState& state_;
  int64_t held_;
  int64_t peak_ = 0;  // of activations, since the last sample
  bool is_changing_ = false;
  std::vector<MemorySample> samples_;
};

using at::Tensor;
using Three = std::tuple<Tensor, Tensor, Tensor>;

Tensor statistics(const Tensor& x, int64_t dims) {
  std::vector<int64_t> sizes = x.sizes().vec();
  for (int64_t i = 0; i < dims; ++i) sizes[sizes.size() - 1 - i] = 1;
  return at::empty(sizes, x.options().dtype(at::kFloat));
}

Three layer_norm(const Tensor& x, c10::SymIntArrayRef shape, const std::optional<Tensor>&,
                 const std::optional<Tensor>&, double) {
  const auto dims = static_cast<int64_t>(shape.size());
  return {at::empty_like(x), statistics(x, dims), statistics(x, dims)};
}

Three layer_norm_backward(const Tensor&, const Tensor& x, c10::SymIntArrayRef, const Tensor&,
                          const Tensor&, const std::optional<Tensor>& weight,
                          const std::optional<Tensor>& bias, std::array<bool, 3>) {
  return {at::empty_like(x), at::empty_like(*weight), at::empty_like(*bias)};
}

Tensor embedding(const Tensor& weight, const Tensor& indices, c10::SymInt, bool, bool) {
  std::vector<int64_t> sizes = indices.sizes().vec();
  sizes.push_back(weight.size(1));
  return at::empty(sizes, weight.options());
}

Tensor embedding_backward(const Tensor& gradient, const Tensor&, c10::SymInt rows, c10::SymInt,
                          bool) {
  return at::empty({rows.expect_int(), gradient.size(-1)}, gradient.options());
}

// Heads lie side by side in memory.
Tensor like_heads(const Tensor& x) {
  return at::empty({x.size(0), x.size(2), x.size(1), x.size(3)}, x.options()).transpose(1, 2);
}

std::tuple<Tensor, Tensor> attention(const Tensor& q, const Tensor&, const Tensor&, double, bool,
                                     const std::optional<Tensor>&, std::optional<double>) {
  return {like_heads(q),
          at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(at::kFloat))};
}

Three attention_backward(const Tensor&, const Tensor& q, const Tensor& k, const Tensor& v,
                         const Tensor&, const Tensor&, double, bool, const std::optional<Tensor>&,
                         std::optional<double>) {
  return {like_heads(q), like_heads(k), like_heads(v)};
}

// LibTorch has these for meta tensors in Python only.
class MetaKernels {
 public:
  MetaKernels()
      : library_(torch::Library::IMPL, "aten", at::DispatchKey::Meta, __FILE__, __LINE__) {
    add("native_layer_norm", &layer_norm);
    add("native_layer_norm_backward", &layer_norm_backward);
    add("embedding", &embedding);
    add("embedding_dense_backward", &embedding_backward);
    add("_scaled_dot_product_flash_attention_for_cpu", &attention);
    add("_scaled_dot_product_flash_attention_for_cpu_backward", &attention_backward);
  }

 private:
  template <class Kernel>
  void add(const std::string& name, Kernel* kernel) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(("aten::" + name).c_str(), "");
    if (!op.hasKernelForDispatchKey(at::DispatchKey::Meta)) library_.impl(name.c_str(), kernel);
  }

  torch::Library library_;
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
  TORCH_CHECK_VALUE(c10::elementSize(*options.autocast) < c10::elementSize(options.dtype),
                    "[activation_moments] options.autocast must be narrower than the parameters' ",
                    c10::toString(options.dtype), "; got ", c10::toString(*options.autocast));
}

// Leaves room for sums: a step keeps more than the logits of all tokens, and the inputs of layers.
void check_total(const TransformerConfig& config, const ActivationOptions& options) {
  const int64_t tokens = options.batch * options.sequence;
  int64_t elements = checked_sum(config.vocabulary, checked_product(config.layers, config.width));
  if (keeps_scores(config, options))
    elements = checked_sum(elements, checked_product(config.heads, options.sequence));
  const int64_t nbytes = checked_product(tokens, checked_product(elements, 64));
  TORCH_CHECK_VALUE(nbytes <= kMostKept, "[activation_moments] activations must have at most ",
                    kMostKept, " bytes; got a batch of ", options.batch, " and a sequence of ",
                    options.sequence, " for ", config.layers, " layers");
}

}  // namespace

std::vector<ActivationMoment> activation_moments(const TransformerConfig& config,
                                                 const ActivationOptions& options) {
  check_options(config, options);
  check_total(config, options);
  const c10::InferenceMode no_inference(false);
  const at::AutoGradMode with_gradients(true);
  static const MetaKernels kernels;  // from now on
  DescribedModel model(config, options.dtype);
  const ShardedModule sharded = fully_shard(
      model.parameters(), {}, {.unit_bytes = 0, .process_group = single_process_group()});
  ShardedState& state = *sharded.state();
  const auto step = [&] {
    at::Tensor logits;
    const Tensor loss = model.loss(options, logits);
    logits.register_hook([&](const Tensor&) {
      state.context().watch.before_change();
      state.context().watch.tell(MemoryEvent::kBackwardBegin);  // the loss is over
    });
    loss.backward();
    state.reducer().clear_all();
  };
  step();  // which shows the order of use
  const MetaTracer tracer(state);
  step();
  return moments_of(state, tracer.samples());
}

}  // namespace tessera
