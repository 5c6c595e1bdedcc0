#include "init/recorder.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <tessera/base/page_heap.h>
#include <tessera/init/deferred_init.h>

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include "base/dispatch/each_tensor.h"
#include "base/dispatch/unit_key.h"
#include "init/deferred_storage.h"
#include "init/random_source.h"

namespace tessera {

// [Note: Deferred init]
//
// In a scope every operator of the thread is dispatched to this file, because the scope includes
// the key of the fallback (access/fallback.cpp) for all of them. The operator really runs, on
// stand-ins for the deferred tensors among its arguments, so that errors and the generator's state
// are those of an eager construction. Its results are then dropped if a recipe can make them again:
//
// - Memory that the operator overwrote or allocated gets the operator as its recipe.
// - An operator that changes a deferred tensor in place becomes the next step of its recipe. It ran
//   on memory without values; none was read.
// - Anything else - large tensors that exist, lists, out=, operators of other libraries - runs on
//   the values themselves, and the tensors that it wrote to keep their memory. That is always
//   right.
namespace {

// A recipe with the state of a generator is not much smaller than this.
constexpr size_t kMinBytes = size_t{16} << 10;
// An evaluation runs all steps; a step that several recipes share is run for each of them.
constexpr int kMostSteps = 64;

thread_local int scopes = 0;
thread_local bool was_seen = false;  // the fallback's key was included before the first scope

bool is_one_of(std::initializer_list<std::string_view> names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool makes_uninitialized(const std::string& name) {
  return is_one_of({"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty",
                    "aten::new_empty_strided", "aten::empty_permuted"},
                   name);
}

bool overwrites(const std::string& name) {
  return is_one_of({"aten::fill_", "aten::zero_", "aten::copy_", "aten::normal_", "aten::uniform_",
                    "aten::random_", "aten::bernoulli_", "aten::exponential_", "aten::geometric_",
                    "aten::cauchy_", "aten::log_normal_"},
                   name);
}

// These operators change the tensor, not its values.
bool changes_metadata(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::inplace_view) ||
         is_one_of({"aten::requires_grad_", "aten::rename_"}, op.schema().name());
}

bool is_written(const c10::Argument& argument) {
  const auto* alias = argument.alias_info();
  // Batch norm's schema does not say that it updates the running statistics.
  return (alias && alias->isWrite()) || argument.name().starts_with("running_");
}

bool is_foreign(const c10::FunctionSchema& schema) { return !schema.name().starts_with("aten::"); }

bool any_tensor(const c10::IValue& value, const std::function<bool(const at::Tensor&)>& test) {
  bool found = false;
  each_tensor(value, [&](const at::Tensor& tensor) { found |= test(tensor); });
  return found;
}

// Returns true for an ordinary new tensor that is large enough and shares its memory with no other.
bool is_fresh(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || !tensor.has_storage()) return false;
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  constexpr c10::DispatchKeySet lazy(
      {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor});
  return typeid(impl) == typeid(c10::TensorImpl) && typeid(storage) == typeid(c10::StorageImpl) &&
         storage.allocator() == c10::GetCPUAllocator() && tensor.storage().use_count() == 1 &&
         tensor.nbytes() >= kMinBytes && storage.nbytes() == tensor.nbytes() &&
         tensor.storage_offset() == 0 && tensor.is_non_overlapping_and_dense() &&
         !tensor.key_set().has_any(lazy);
}

// Copies a small tensor for a recipe, because its values may change later.
at::Tensor copy_of(const at::Tensor& tensor) {
  at::Tensor copy = tensor.detach().clone();
  // Numbers count less than tensors in type promotion.
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return copy;
}

// An operator call in a scope.
class Call {
 public:
  Call(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack& stack)
      : op_(op),
        schema_(op.schema()),
        below_(below),
        stack_(stack),
        arguments_(torch::jit::last(stack, schema_.arguments().size()).vec()),
        in_place_(!arguments_.empty() && is_written(schema_.arguments()[0])),
        in_graph_(at::GradMode::is_enabled() &&
                  any_argument([](const at::Tensor& tensor) { return tensor.requires_grad(); })) {}

  void run() {
    if (makes_uninitialized(schema_.name())) return make_uninitialized();
    if (!takes_stand_ins()) return run_on_values();
    plan();
    const bool on_deferred = in_place_ && is_deferred(self());
    if (!recordable_ && (on_deferred || in_graph_)) return run_on_values();
    run_on_stand_ins();
  }

 private:
  const at::Tensor& self() const { return arguments_[0].toTensor(); }

  bool any_argument(const std::function<bool(const at::Tensor&)>& test) const {
    return std::any_of(arguments_.begin(), arguments_.end(),
                       [&](const c10::IValue& argument) { return any_tensor(argument, test); });
  }

  void make_uninitialized() {
    op_.redispatchBoxed(below_, &stack_);
    const at::Tensor& result = stack_.back().toTensor();
    if (!is_fresh(result)) return;
    stack_.back() = make_deferred(
        result, c10::make_intrusive<DeferredStorage>(*result.storage().unsafeGetStorageImpl()));
  }

  bool takes_stand_ins() const {
    if (is_foreign(schema_) || changes_metadata(op_)) return false;
    const bool returns_self =
        in_place_ && arguments_[0].isTensor() && schema_.returns().size() == 1;
    if (in_place_ && (in_graph_ || !returns_self)) return false;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (i > 0 && is_written(schema_.arguments()[i])) return false;
      const bool is_list = !arguments_[i].isTensor();
      if (any_tensor(arguments_[i], [&](const at::Tensor& tensor) {
            return is_deferred(tensor) && (is_list || (i > 0 && is_alias_of_self(tensor)));
          })) {
        return false;
      }
    }
    return true;
  }

  bool is_alias_of_self(const at::Tensor& tensor) const {
    return in_place_ && deferred_storage(tensor) == deferred_storage(self());
  }

  // Runs the operator on the values, without recording it.
  void run_on_values() {
    const bool keep_all = is_foreign(schema_) || changes_metadata(op_);
    std::vector<at::Tensor> read;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const bool keep = keep_all || is_written(schema_.arguments()[i]);
      each_tensor(arguments_[i], [&](const at::Tensor& tensor) {
        DeferredStorage* storage = deferred_storage(tensor);
        if (!storage) return;
        if (!keep && storage->is_deferred()) read.push_back(tensor);
        keep ? storage->settle() : storage->materialize();
      });
    }
    op_.redispatchBoxed(below_, &stack_);
    for (const at::Tensor& tensor : read) deferred_storage(tensor)->drop();
  }

  // Makes the recipe of the operator's result, if one is possible.
  void plan() {
    node_ = std::make_shared<Node>(
        Node{.op = op_, .arguments = arguments_, .inputs = {}, .in_place = in_place_});
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (arguments_[i].isTensor()) {
        const at::Tensor& tensor = arguments_[i].toTensor();
        if (tensor.defined() && !add_input(i, tensor)) recordable_ = false;
      } else if (any_tensor(arguments_[i], [](const at::Tensor&) { return true; })) {
        recordable_ = false;
      }
    }
    if (node_->steps > kMostSteps) recordable_ = false;
  }

  // Returns false if the recipe would have to keep the tensor.
  bool add_input(size_t i, const at::Tensor& tensor) {
    const bool is_self = in_place_ && i == 0;
    const DeferredStorage* storage = deferred_storage(tensor);
    const bool unread = is_self && storage && overwrites(schema_.name()) &&
                        tensor.nbytes() == storage->nbytes() &&
                        tensor.is_non_overlapping_and_dense();
    if (unread || is_deferred(tensor)) {
      Recipe recipe = unread ? nullptr : storage->recipe();
      if (recipe) node_->steps += recipe->steps;
      node_->arguments[i] = c10::IValue();
      node_->inputs.push_back({i, without_memory(tensor), storage->nbytes(), std::move(recipe)});
      return true;
    }
    if (is_self || tensor.layout() != at::kStrided || tensor.is_nested()) return false;
    if (tensor.nbytes() >= kMinBytes) return false;
    node_->arguments[i] = copy_of(tensor);
    return true;
  }

  void run_on_stand_ins() {
    torch::jit::Stack values = arguments_;
    std::vector<DeferredStorage*> lent;
    for (const Node::Input& input : node_->inputs) {
      const at::Tensor& tensor = arguments_[input.argument].toTensor();
      DeferredStorage* storage = deferred_storage(tensor);
      if (!storage->is_deferred()) continue;  // its memory is overwritten
      if (in_graph_) {                        // autograd must see the tensor itself
        storage->materialize();
        lent.push_back(storage);
      } else {
        const bool is_self = in_place_ && input.argument == 0;
        values[input.argument] =
            on_storage(tensor, is_self ? fresh_storage(input.nbytes) : evaluate(input.recipe));
      }
    }
    {
      const RandomSource source;
      op_.callBoxed(values);
      node_->generator = source.before_draws();
    }
    for (DeferredStorage* storage : lent) storage->drop();
    finish(std::move(values));
  }

  void finish(torch::jit::Stack values) {
    torch::jit::drop(stack_, arguments_.size());
    if (in_place_) {
      if (recordable_) {
        DeferredStorage* const storage = deferred_storage(self());
        node_->nbytes = storage->nbytes();
        storage->defer(node_);
      }
      stack_.emplace_back(self());
    } else {
      if (recordable_ && values.size() == 1 && values[0].isTensor())
        defer_result(values[0].toTensor());
      stack_.insert(stack_.end(), values.begin(), values.end());
    }
  }

  void defer_result(const at::Tensor& result) {
    if (!is_fresh(result)) return;
    node_->nbytes = result.nbytes();
    fix_dtype(result.scalar_type());
    const auto storage = c10::make_intrusive<DeferredStorage>(node_);
    result.set_data(make_deferred(result, storage));
  }

  // The default dtype may differ when the recipe is evaluated.
  void fix_dtype(at::ScalarType dtype) {
    if (std::ranges::any_of(arguments_, &c10::IValue::isTensor)) return;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (arguments_[i].isNone() && schema_.arguments()[i].name() == "dtype") {
        node_->arguments[i] = dtype;
      }
    }
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  c10::DispatchKeySet below_;
  torch::jit::Stack& stack_;
  std::vector<c10::IValue> arguments_;
  bool in_place_;
  bool in_graph_;
  std::shared_ptr<Node> node_;
  bool recordable_ = true;
};

}  // namespace

DeferredInit::DeferredInit() {
  // Malloc would put small tensors into the holes of freed ones, and grow for the next large one.
  use_page_heap();
  if (scopes++ > 0) return;
  was_seen = c10::impl::tls_is_dispatch_key_included(kUnitKey);
  c10::impl::tls_set_dispatch_key_included(kUnitKey, true);
}

DeferredInit::~DeferredInit() {
  if (--scopes == 0) c10::impl::tls_set_dispatch_key_included(kUnitKey, was_seen);
}

bool in_deferred_init() { return scopes > 0; }

void call_deferred(const c10::OperatorHandle& op, c10::DispatchKeySet below,
                   torch::jit::Stack* stack) {
  if (RandomSource* source = RandomSource::current()) {
    source->serve(op.schema(), *stack);
    op.redispatchBoxed(below, stack);
    return;
  }
  const c10::impl::ExcludeDispatchKeyGuard exclude(kUnitKey);
  if (in_deferred_init()) return Call(op, below, *stack).run();
  settle(torch::jit::last(*stack, op.schema().arguments().size()));
  op.redispatchBoxed(below, stack);
}

void settle(c10::ArrayRef<c10::IValue> arguments) {
  for (const c10::IValue& argument : arguments) {
    each_tensor(argument, [](const at::Tensor& tensor) {
      if (DeferredStorage* storage = deferred_storage(tensor)) storage->settle();
    });
  }
}

}  // namespace tessera
