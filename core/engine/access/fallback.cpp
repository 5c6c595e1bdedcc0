#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_unique.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "base/dispatch/each_tensor.h"
#include "engine/unit/unit.h"
#include "init/origin.h"
#include "init/recorder.h"

namespace tessera {

// [Note: Access through the dispatcher]
//
// C++ modules have no hooks, so parameters are watched one level below. All parameters of a unit
// carry one more dispatch key. Nothing else uses it, and it comes before autograd and autocast. The
// fallback registered here for that key therefore sees every operator that touches a parameter, a
// view of one, or a tensor that autograd saved from one (all share the unit's storage), and gathers
// the unit before the operator runs. The key is excluded while the operator runs, so operators
// inside it are not seen again.
//
// Operators that make a view read no data, so nothing is gathered for them; the view is seen when
// it is used. Some of them may copy instead (`reshape`, `contiguous`, `to`): the key is not
// excluded for them, so that the copying operator is seen. After an operator that writes to a
// parameter, this rank's part is copied to its shard.
//
// Deferred tensors carry the same key; operators without a parameter of a unit are passed to
// deferred init. See [Note: Deferred init] in init/recorder.cpp.
namespace {

bool is_view(const c10::FunctionSchema& schema) {
  const auto& returns = schema.returns();
  if (returns.empty()) return false;
  return std::all_of(returns.begin(), returns.end(), [](const c10::Argument& result) {
    return result.alias_info() && !result.alias_info()->isWrite();
  });
}

// `set_data()` asks whether one tensor can replace the other; no value is read.
bool reads_no_data(const c10::OperatorHandle& op) {
  return op.operator_name().name == "aten::_has_compatible_shallow_copy_type";
}

void add_unit(std::vector<Unit*>& units, const at::Tensor& tensor) {
  Unit* unit = unit_of(tensor);
  if (unit && std::find(units.begin(), units.end(), unit) == units.end()) units.push_back(unit);
}

// An operator mostly uses parameters of a single model. Each model is notified of its own units
// only, as their uses have positions in that model's order.
class UseScope {
 public:
  UseScope(const std::vector<Unit*>& used, const std::vector<Unit*>& written) {
    for_each_model(used, [&](UseListener& model, const std::vector<Unit*>& units) {
      const bool writes = std::any_of(written.begin(), written.end(), [&](const Unit* unit) {
        return &unit->listener() == &model;
      });
      models_.emplace_back().model = model.on_use(units, writes);
    });
  }

  template <class F>
  static void for_each_model(const std::vector<Unit*>& units, F&& f) {
    auto is_of_first = [&](const Unit* unit) {
      return &unit->listener() == &units.front()->listener();
    };
    if (std::all_of(units.begin(), units.end(), is_of_first))
      return f(units.front()->listener(), units);
    std::vector<Unit*> rest = units;
    while (!rest.empty()) {
      UseListener& model = rest.front()->listener();
      const auto others = std::stable_partition(
          rest.begin(), rest.end(), [&](const Unit* unit) { return &unit->listener() == &model; });
      f(model, std::vector<Unit*>(rest.begin(), others));
      rest.erase(rest.begin(), others);
    }
  }

 private:
  struct Use {
    std::shared_ptr<UseListener> model;
    Use() = default;
    Use(Use&&) = default;
    ~Use() {
      if (model) model->on_used();
    }
  };
  c10::SmallVector<Use, 1> models_;
};

// `embedding_renorm_` writes to the rows that its indices name, and each rank's batch names others:
// all ranks write to the rows of all, as one process does with the whole batch. Collective.
void take_rows_of_all(const Unit& unit, c10::IValue& indices) {
  const ShardMesh& mesh = unit.mesh();
  if (mesh.size() == 1) return;
  const at::Tensor given = indices.toTensor();
  const at::Tensor own = std::get<0>(at::_unique(given.to(at::kCPU, at::kLong)));
  std::string all;
  for (const std::string& rows : mesh.all_gather_bytes(
           {static_cast<const char*>(own.const_data_ptr()), own.nbytes()},
           {"rows of embedding_renorm_ in " + unit.layout().name, Channel::kControl}))
    all += rows;
  const at::Tensor rows =
      at::empty({static_cast<int64_t>(all.size() / sizeof(int64_t))}, at::kLong);
  std::memcpy(rows.mutable_data_ptr(), all.data(), all.size());
  indices = rows.to(given.options());
}

// A normalization that trains writes to its running statistics; its schema does not say so.
void check_no_hidden_write(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments,
                           size_t i, const at::Tensor& tensor) {
  if (!schema.arguments()[i].name().starts_with("running_")) return;
  const Unit* const unit = unit_of(tensor);
  if (!unit || unit->mesh().size() == 1) return;
  for (size_t k = 0; k < arguments.size(); ++k) {
    const std::string& name = schema.arguments()[k].name();
    const bool tells = name == "training" || name == "use_input_stats";
    TORCH_CHECK_NOT_IMPLEMENTED(!tells || !arguments[k].toBool(),
                                "[tessera] running statistics, to which ", schema.name(),
                                " writes, can't be parameters of a sharded model (", unit->label(),
                                "): register them as buffers, or name them in plan.ignored");
  }
}

void call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const c10::DispatchKeySet below(c10::DispatchKeySet::FULL_AFTER, kUnitKey);
  if (is_view(schema) || (schema.returns().size() == 1 && reads_no_data(op))) {
    op.redispatchBoxed(keys & below, stack);
    return;
  }
  std::vector<Unit*> used, written;
  const auto arguments = torch::jit::last(*stack, schema.arguments().size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      add_unit(used, tensor);
      check_no_hidden_write(schema, arguments, i, tensor);
      if (alias && alias->isWrite()) add_unit(written, tensor);
    });
  }
  if (used.empty()) return call_deferred(op, keys & below, stack);
  c10::impl::ExcludeDispatchKeyGuard exclude(kUnitKey);
  settle(arguments);
  const UseScope scope(used, written);
  if (written.empty()) return op.redispatchBoxed(keys & below, stack);
  if (op.operator_name().name == "aten::embedding_renorm_")
    take_rows_of_all(*written.front(), torch::jit::peek(*stack, 1, arguments.size()));
  for (Unit* unit : written) unit->begin_write();
  try {
    op.redispatchBoxed(keys & below, stack);
  } catch (...) {
    for (Unit* unit : written) unit->cancel_write();
    throw;
  }
  UseScope::for_each_model(
      written, [](UseListener& model, const std::vector<Unit*>& units) { model.on_write(units); });
}

bool writes(const c10::FunctionSchema& schema) {
  const auto& returns = schema.returns();
  return std::any_of(returns.begin(), returns.end(), [](const c10::Argument& result) {
    return result.alias_info() && result.alias_info()->isWrite();
  });
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  call(op, keys, stack);
  if (!OriginScope::current() || writes(op.schema())) return;
  mark_origin(torch::jit::last(*stack, op.schema().returns().size()));
}

}  // namespace

TORCH_LIBRARY_IMPL(_, DeferredInit, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace tessera
