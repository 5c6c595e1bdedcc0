// FairScale's interface; see `tessera.fairscale`.
#include <tessera/dialects/fairscale.h>

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "python/binding/make_scaler.h"
#include "python/binding/module_tree.h"
#include "python/binding/python_optimizer.h"
#include "python/binding/state_dict.h"

namespace tessera::python {
namespace {

// OSS over an optimizer of Python, whose param groups it shares.
class Oss final : public fairscale::AnyOss {
 public:
  Oss(std::unique_ptr<PythonOptimizer> inner, const fairscale::OssOptions& options)
      : AnyOss(std::unique_ptr<torch::optim::Optimizer>(inner.get()), options),
        inner_(inner.release()) {}

  PythonOptimizer& inner() { return *inner_; }

 private:
  PythonOptimizer* inner_;  // owned by the base
};

std::shared_ptr<Oss> make_oss(const py::object& optimizer, ProcessGroupPtr group,
                              bool broadcast_fp16) {
  auto inner = std::make_unique<PythonOptimizer>(optimizer);
  const Waiting waiting;
  return std::make_shared<Oss>(
      std::move(inner),
      fairscale::OssOptions{.group = std::move(group), .broadcast_fp16 = broadcast_fp16});
}

// Appends the last group of Python's optimizer.
void add_group(Oss& oss) {
  std::vector<at::Tensor> params;
  {
    const py::gil_scoped_acquire acquire;
    const py::list groups = oss.inner().optimizer().attr("param_groups");
    params = groups[groups.size() - 1]["params"].cast<std::vector<at::Tensor>>();
  }
  oss.add_param_group(torch::optim::OptimizerParamGroup(params, oss.defaults().clone()));
}

double clip_oss(Oss& oss, double max_norm, double norm_type, const py::object& filter) {
  std::function<bool(const at::Tensor&)> accepts;
  if (!filter.is_none())
    accepts = [&](const at::Tensor& param) {
      const py::gil_scoped_acquire acquire;
      return py::cast<bool>(filter(param));
    };
  const Waiting waiting;
  return oss.clip_grad_norm(max_norm, norm_type, accepts);
}

// Waits until the parameters are whole on this rank. Collective.
void gather(Oss& oss) {
  oss.with_sharded([](ShardedOptimizer& sharded) {
    ShardedModule module = sharded.module();
    const auto whole = module.keep_unsharded();
  });
}

class Ddp final : public fairscale::AnyShardedDataParallel {
 public:
  Ddp(const NamedTensors& parameters, const NamedTensors& buffers,
      const std::vector<std::shared_ptr<Oss>>& optimizers,
      const fairscale::ShardedDataParallelOptions& options)
      : AnyShardedDataParallel(module_tree(parameters, buffers), pointers(optimizers), options),
        optimizers_(optimizers) {}

  using AnyShardedDataParallel::begin_forward;
  using AnyShardedDataParallel::convert;
  using AnyShardedDataParallel::end_forward;

 private:
  static std::vector<fairscale::AnyOss*> pointers(
      const std::vector<std::shared_ptr<Oss>>& optimizers) {
    std::vector<fairscale::AnyOss*> result;
    for (const auto& optimizer : optimizers) result.push_back(optimizer.get());
    return result;
  }

  std::vector<std::shared_ptr<Oss>> optimizers_;
};

std::shared_ptr<Ddp> make_ddp(const NamedTensors& parameters, const NamedTensors& buffers,
                              const std::vector<std::shared_ptr<Oss>>& optimizers,
                              ProcessGroupPtr group, bool broadcast_buffers, bool sync_models,
                              std::optional<int64_t> reduce_buffer_size, bool auto_refresh,
                              bool reduce_fp16, bool warn_on_change) {
  return std::make_shared<Ddp>(
      parameters, buffers, optimizers,
      fairscale::ShardedDataParallelOptions{.process_group = std::move(group),
                                            .broadcast_buffers = broadcast_buffers,
                                            .sync_models_at_startup = sync_models,
                                            .reduce_buffer_size = reduce_buffer_size,
                                            .auto_refresh_trainable = auto_refresh,
                                            .reduce_fp16 = reduce_fp16,
                                            .warn_on_trainable_params_changed = warn_on_change});
}

}  // namespace

void bind_fairscale(py::module_& module) {
  py::class_<Oss, std::shared_ptr<Oss>>(module, "Oss")
      .def(py::init(&make_oss))
      .def("step",
           [](Oss& oss, const py::dict& arguments) {
             oss.inner().set_step_arguments(arguments);
             const Waiting waiting;
             oss.step();
           })
      .def("gather", &gather, Waits())
      .def("add_group", &add_group, Waits())
      .def("note_parts", [](Oss& oss) { oss.inner().note_parts(); })
      .def("part_of", [](Oss& oss, const at::Tensor& param) { return oss.inner().part_of(param); })
      .def("clip_grad_norm", &clip_oss)
      .def("consolidate_state_dict", &Oss::consolidate_state_dict, Waits())
      .def("state_dict",
           [](Oss& oss) { return to_python(oss.state_dict(), oss.inner().optimizer()); })
      .def("load_state_dict",
           [](Oss& oss, const py::dict& state) {
             const OptimizerStateDict dict = to_state_dict(state);
             const Waiting waiting;
             oss.load_state_dict(dict);
           })
      .def("partition_parameters", &Oss::partition_parameters)
      .def("gradient", &Oss::gradient, Waits())
      .def("unwrap", &Oss::unwrap, Waits());

  py::class_<Ddp, std::shared_ptr<Ddp>>(module, "ShardedDataParallel")
      .def(py::init(&make_ddp), Waits())
      .def("begin_forward", &Ddp::begin_forward, Waits())
      .def("end_forward", &Ddp::end_forward)
      .def("convert", &Ddp::convert, Waits())
      .def("reduce", &Ddp::reduce, Waits())
      .def("sync_buffers", &Ddp::sync_buffers, Waits())
      .def("refresh_trainable", &Ddp::refresh_trainable, Waits())
      .def("zero_grad", &Ddp::zero_grad, Waits())
      .def("sharded", &Ddp::sharded)
      .def("unwrap", &Ddp::unwrap, Waits())
      .def(
          "join",
          [](Ddp& ddp, const py::function& train) {
            ddp.join([&] {
              const py::gil_scoped_acquire acquire;
              train();
            });
          },
          Waits());

  py::class_<fairscale::ShardedGradScaler, GradScaler,
             std::shared_ptr<fairscale::ShardedGradScaler>>(module, "ShardedGradScaler")
      .def(py::init(&make_scaler<fairscale::ShardedGradScaler>))
      .def(
          "unscale_", [](fairscale::ShardedGradScaler& scaler, Oss& oss) { scaler.unscale_(oss); },
          Waits())
      .def(
          "step", [](fairscale::ShardedGradScaler& scaler, Oss& oss) { return scaler.step(oss); },
          Waits());
}

}  // namespace tessera::python
