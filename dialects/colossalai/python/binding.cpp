// ColossalAI's interface; see `tessera.colossalai`.
#include <tessera/dialects/colossalai.h>

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "python/binding/entered.h"
#include "python/binding/module_tree.h"
#include "python/binding/plan.h"
#include "python/binding/sharded_optimizer.h"
#include "python/binding/state_dict.h"

namespace tessera::python {
namespace {

using colossalai::BaseShardStrategy;

// A strategy that was written in Python: its `apply` gets the parameters by name, and returns
// fields of a plan.
class PythonStrategy final : public BaseShardStrategy {
 public:
  explicit PythonStrategy(py::function apply) : apply_(std::move(apply)) {}
  ~PythonStrategy() override {
    const py::gil_scoped_acquire acquire;
    apply_.release().dec_ref();
  }

  void apply(const torch::nn::Module& module, ShardPlan& plan) const override {
    const py::gil_scoped_acquire acquire;
    py::dict parameters;
    std::set<const c10::TensorImpl*> seen;  // a tied parameter has its first name, as in Python
    for (const auto& item : module.named_parameters()) {
      if (seen.insert(item.value().unsafeGetTensorImpl()).second)
        parameters[py::str(item.key())] = py::cast(item.value());
    }
    set_fields(plan, apply_(parameters).cast<py::dict>());
  }

 private:
  py::function apply_;
};

using ZeroContext = Entered<colossalai::ZeroInitContext>;
using NoShardContext = Entered<colossalai::NoShardZeroContext>;

void enter_zero(ZeroContext& context, at::Device device, colossalai::ShardStrategyPtr strategy,
                bool shard_param, bool rm_torch_payload_on_the_fly,
                const std::optional<at::Tensor>& model_numel_tensor, ProcessGroupPtr group,
                at::ScalarType param_dtype, std::optional<uint64_t> seed) {
  context.enter(
      device, std::move(strategy),
      colossalai::ZeroInitOptions{.shard_param = shard_param,
                                  .rm_torch_payload_on_the_fly = rm_torch_payload_on_the_fly,
                                  .model_numel_tensor = model_numel_tensor.value_or(at::Tensor()),
                                  .dp_process_group = std::move(group),
                                  .param_dtype = param_dtype,
                                  .seed = seed});
}

colossalai::ShardedModelV2Options model_options(
    ProcessGroupPtr group, ProcessGroupPtr reduce_group, double bucket_mb, bool fp32_reduce_scatter,
    std::map<std::string, std::string> offload_config, std::optional<double> predivide_factor,
    bool use_memory_tracer, bool reuse_fp16_shard, std::string tensor_placement_policy,
    std::optional<int64_t> memory_budget, bool sync_buffers) {
  return {.process_group = std::move(group),
          .reduce_scatter_process_group = std::move(reduce_group),
          .reduce_scatter_bucket_size_mb = bucket_mb,
          .fp32_reduce_scatter = fp32_reduce_scatter,
          .offload_config = std::move(offload_config),
          .tensor_placement_policy = std::move(tensor_placement_policy),
          .memory_budget = memory_budget,
          .gradient_predivide_factor = predivide_factor,
          .use_memory_tracer = use_memory_tracer,
          .reuse_fp16_shard = reuse_fp16_shard,
          .sync_buffers = sync_buffers};
}

struct Tree {
  std::shared_ptr<torch::nn::Module> tree;
};

class ModelV2 final : private Tree, public colossalai::AnyShardedModelV2 {
 public:
  ModelV2(const NamedTensors& parameters, const NamedTensors& buffers,
          const colossalai::ShardStrategyPtr& strategy,
          const colossalai::ShardedModelV2Options& options)
      : Tree{module_tree(parameters, buffers)}, AnyShardedModelV2(*tree, strategy, options) {}
};

colossalai::ShardedOptimizerV2Options optimizer_options(
    bool cpu_offload, double gpu_margin_mem_ratio, double initial_scale, double min_scale,
    double growth_factor, double backoff_factor, int64_t growth_interval, int64_t hysteresis,
    double max_scale, bool keep_unsharded, ProcessGroupPtr dp_group, ProcessGroupPtr mp_group) {
  return {.cpu_offload = cpu_offload,
          .gpu_margin_mem_ratio = gpu_margin_mem_ratio,
          .initial_scale = initial_scale,
          .min_scale = min_scale,
          .growth_factor = growth_factor,
          .backoff_factor = backoff_factor,
          .growth_interval = growth_interval,
          .hysteresis = hysteresis,
          .max_scale = max_scale,
          .keep_unsharded = keep_unsharded,
          .dp_process_group = std::move(dp_group),
          .mp_process_group = std::move(mp_group)};
}

class OptimizerV2 final : public ShardedPythonOptimizer {
  using V2 = colossalai::ShardedOptimizerV2;

 public:
  OptimizerV2(std::unique_ptr<PythonOptimizer> inner, const std::shared_ptr<V2>& own)
      : ShardedPythonOptimizer(std::move(inner),
                               std::shared_ptr<ShardedOptimizer>(own, &own->sharded())),
        own_(own) {}

  // As `ShardedPythonOptimizer::use()`.
  template <class Use>
  auto use_own(const Use& use) {
    return this->use([&](ShardedOptimizer&) { return use(*own_); });
  }

 private:
  std::shared_ptr<V2> own_;
};

std::shared_ptr<OptimizerV2> make_optimizer(ModelV2& model, const py::object& optimizer,
                                            const colossalai::ShardedOptimizerV2Options& options) {
  auto inner = std::make_unique<PythonOptimizer>(optimizer);
  const Waiting waiting;
  auto own = std::make_shared<colossalai::ShardedOptimizerV2>(model, *inner, options);
  return std::make_shared<OptimizerV2>(std::move(inner), own);
}

void bind_contexts(py::module_& module) {
  py::class_<BaseShardStrategy, std::shared_ptr<BaseShardStrategy>>(module, "ShardStrategy");
  py::class_<colossalai::TensorShardStrategy, BaseShardStrategy,
             std::shared_ptr<colossalai::TensorShardStrategy>>(module, "TensorShardStrategy")
      .def(py::init());
  py::class_<colossalai::BucketTensorShardStrategy, BaseShardStrategy,
             std::shared_ptr<colossalai::BucketTensorShardStrategy>>(module,
                                                                     "BucketTensorShardStrategy")
      .def(py::init());
  py::class_<PythonStrategy, BaseShardStrategy, std::shared_ptr<PythonStrategy>>(module,
                                                                                 "PythonStrategy")
      .def(py::init<py::function>());
  py::class_<ZeroContext>(module, "ZeroInitContext")
      .def(py::init())
      .def("enter", &enter_zero)
      .def("exit", &ZeroContext::exit);
  py::class_<NoShardContext>(module, "NoShardZeroContext")
      .def(py::init())
      .def("enter", [](NoShardContext& context, bool replicated) { context.enter(replicated); })
      .def("exit", &NoShardContext::exit);
}

}  // namespace

void bind_colossalai(py::module_& module) {
  bind_contexts(module);

  py::class_<colossalai::ShardedModelV2Options>(module, "ShardedModelV2Options")
      .def(py::init(&model_options));
  py::class_<ModelV2, std::shared_ptr<ModelV2>>(module, "ShardedModelV2")
      .def(py::init<const NamedTensors&, const NamedTensors&, const colossalai::ShardStrategyPtr&,
                    const colossalai::ShardedModelV2Options&>(),
           Waits())
      .def("sharded", &ModelV2::sharded)
      .def("backward", &ModelV2::backward, Waits())
      .def("backward_by_grad", &ModelV2::backward_by_grad, Waits())
      .def("zero_grad", &ModelV2::zero_grad, Waits())
      .def("dump_memory_stats", &ModelV2::dump_memory_stats, Waits())
      .def("unwrap", &ModelV2::unwrap, Waits());

  py::class_<colossalai::ShardedOptimizerV2Options>(module, "ShardedOptimizerV2Options")
      .def(py::init(&optimizer_options));
  py::class_<OptimizerV2, ShardedPythonOptimizer, std::shared_ptr<OptimizerV2>>(
      module, "ShardedOptimizerV2")
      .def(py::init(&make_optimizer))
      .def(
          "backward",
          [](OptimizerV2& self, const at::Tensor& loss) {
            self.use_own([&](auto& it) { it.backward(loss); });
          },
          Waits())
      .def(
          "backward_by_grad",
          [](OptimizerV2& self, const at::Tensor& tensor, const at::Tensor& grad) {
            self.use_own([&](auto& it) { it.backward_by_grad(tensor, grad); });
          },
          Waits())
      .def(
          "step",
          [](OptimizerV2& self) { return self.use_own([](auto& it) { return it.step(); }); },
          Waits())
      .def(
          "clip_grad_norm",
          [](OptimizerV2& self, double max_norm, double norm_type) {
            return self.use_own([&](auto& it) { return it.clip_grad_norm(max_norm, norm_type); });
          },
          Waits())
      .def(
          "zero_grad", [](OptimizerV2& self) { self.use_own([](auto& it) { it.zero_grad(); }); },
          Waits())
      .def("state_dict",
           [](OptimizerV2& self) {
             colossalai::ShardedOptimizerV2State state;
             {
               const Waiting waiting;
               state = self.use_own([](auto& it) { return it.state_dict(); });
             }
             return std::make_pair(to_python(state.optimizer, self.inner().optimizer()),
                                   state.scaler);
           })
      .def("load_state_dict",
           [](OptimizerV2& self, const py::dict& optimizer, std::map<std::string, double> scaler) {
             const colossalai::ShardedOptimizerV2State state{to_state_dict(optimizer),
                                                             std::move(scaler)};
             const Waiting waiting;
             self.use_own([&](auto& it) { it.load_state_dict(state); });
           })
      .def(
          "unwrap", [](OptimizerV2& self) { self.use_own([](auto& it) { it.unwrap(); }); }, Waits())
      .def("loss_scale",
           [](OptimizerV2& self) { return self.use_own([](auto& it) { return it.loss_scale(); }); })
      .def("get_memory_usage", [](OptimizerV2& self) {
        return self.use_own([](auto& it) { return it.get_memory_usage(); });
      });
}

}  // namespace tessera::python
