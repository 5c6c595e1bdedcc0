#include <fmt/ranges.h>
#include <tessera/capi/tessera.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/comm/world.h>
#include <tessera/engine/plan_fields.h>

#include <bit>
#include <map>
#include <set>

#include "base/files/json_text.h"
#include "engine/optim/optimizer_kinds.h"
#include "tensor/shard_mesh.h"

using namespace tessera;  // the functions are C's
using nlohmann::json;

struct tessera_handle {
  virtual ~tessera_handle() = default;
};

struct tessera_world : tessera_handle {
  std::shared_ptr<World> world;
};

struct tessera_model : tessera_handle {
  std::shared_ptr<World> world;  // destroyed last
  std::map<std::string, at::Tensor> parameters;
  std::unique_ptr<torch::optim::Optimizer> inner;
  std::optional<ShardedModule> sharded;
  std::unique_ptr<ShardedOptimizer> optimizer;
};

namespace {

thread_local std::string last_error;

// Returns the status of a call, and keeps the message of its error.
template <class F>
tessera_status run(const char* function, const F& call) noexcept {
  try {
    call();
    return TESSERA_OK;
  } catch (const std::exception& error) {
    const auto* const ours = dynamic_cast<const c10::Error*>(&error);
    const std::string text = ours ? ours->what_without_backtrace() : error.what();
    last_error = text.starts_with('[') ? text : fmt::format("[{}] {}", function, text);
    if (dynamic_cast<const c10::ValueError*>(&error)) return TESSERA_BAD_ARGUMENT;
    if (dynamic_cast<const c10::NotImplementedError*>(&error)) return TESSERA_NOT_IMPLEMENTED;
    return dynamic_cast<const c10::DistError*>(&error) ? TESSERA_RANK_FAILED : TESSERA_FAILED;
  }
}

template <class T>
T* given(T* pointer, const char* name) {
  TORCH_CHECK_VALUE(pointer, name, " must not be null");
  return pointer;
}

// Sets an option of a type that JSON has.
template <class T>
auto read(const char* name, const json& value, T& option) -> decltype(value.get<T>(), void()) {
  if constexpr (std::is_same_v<T, at::ScalarType>) {
    const auto found = c10::getStringToDtypeMap().find(value.get<std::string>());
    TORCH_CHECK_VALUE(found != c10::getStringToDtypeMap().end(), "'", name,
                      "' must be a dtype such as bfloat16; got ", shortened(value.dump()));
    option = found->second;
  } else if constexpr (std::is_enum_v<T>) {
    std::string names;
    for (const auto& choice : kPlanChoices<T>) names.append(" ").append(choice.name);
    const auto found = find_plan_choice<T>(value.get<std::string>());
    TORCH_CHECK_VALUE(found, "'", name, "' must be one of", names, "; got ", value.dump());
    option = *found;
  } else if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
    using Limits = std::numeric_limits<T>;
    option = static_cast<T>(whole_number(value, name, Limits::min(), Limits::max()));
  } else {
    option = value.get<T>();
  }
}
template <class T>
auto read(const char* name, const json& value, std::optional<T>& option)
    -> decltype(value.get<T>(), void()) {
  if (value.is_null()) return option.reset();
  read(name, value, option.emplace());
}

// Sets each option that `visit(set)` passes to `set` with its name, and refuses others.
template <class Visit>
void read_options(const char* text, const char* subject, const Visit& visit) {
  std::string part = subject;
  try {
    const auto given = parse_json(text ? text : "{}").get<std::map<std::string, json>>();
    std::set<std::string> known;
    visit([&](const char* name, auto& option) {
      part = fmt::format("'{}' in {}", name, subject);
      known.insert(name);
      if (given.contains(name)) read(name, given.at(name), option);
    });
    for (const auto& [name, value] : given)
      TORCH_CHECK_VALUE(known.contains(name), subject, " has no '", name, "'; expected ",
                        fmt::format("{}", fmt::join(known, ", ")));
  } catch (const json::exception& error) {
    TORCH_CHECK_VALUE(false, part, " can't be read: ", shortened(error.what(), kMostShown));
  }
}

ShardPlan plan_of(const char* text) {
  ShardPlan plan;
  read_options(text, "`plan`", [&](const auto& set) {
    const auto visit = [&](std::string_view field, auto& member) {
      const std::string name(field.substr(field.rfind('.') + 1));  // npos + 1 is 0
      if constexpr (requires { read("", json(), member); })
        if (name != "sync_buffers" && name != "cast_inputs") set(name.c_str(), member);
    };
    visit_fields(visit, plan);
  });
  return plan;
}

auto make_optimizer(const char* text, const std::vector<NamedTensor>& parameters,
                    const ShardPlan& plan) {
  std::vector<at::Tensor> tensors;
  std::set<const c10::TensorImpl*> taken;
  for (const auto& [name, tensor] : parameters)
    if (std::ranges::count(plan.ignored, name) == 0 &&
        taken.insert(tensor.unsafeGetTensorImpl()).second)
      tensors.push_back(tensor);
  std::unique_ptr<torch::optim::Optimizer> made;
  read_options(text, "`optimizer`", [&](const auto& set) {
    std::string name, names;
    set("name", name);
    const auto is_it = [&](auto kind) {
      names.append(" ").append(kind.kName);
      return name == kind.kName;
    };
    with_fixed_kind_if(is_it, [&](auto kind) {
      typename decltype(kind)::Options options(1e-3);
      kind.visit_options(options, set);
      made = std::make_unique<typename decltype(kind)::Optimizer>(tensors, options);
    });
    TORCH_CHECK_VALUE(made, "'name' in `optimizer` must be one of", names, "; got '", name, "'");
  });
  return made;
}

std::vector<NamedTensor> named(const char* const* names, void* const* tensors, int64_t begin,
                               int64_t end) {
  std::vector<NamedTensor> result;
  for (int64_t i = begin; i < end; ++i) {
    const char* const name = given(given(names, "`names`")[i], "each of `names`");
    void* const tensor = given(given(tensors, "`tensors`")[i], "each of `tensors`");
    result.push_back({name, *static_cast<at::Tensor*>(tensor)});
    TORCH_CHECK_VALUE(result.back().tensor.defined(), "tensor '", name, "' is undefined");
  }
  return result;
}

}  // namespace

const char* tessera_error() { return last_error.c_str(); }

tessera_status tessera_init(const char* backend, tessera_world** world, int* rank, int* size) {
  return run("tessera_init", [&] {
    given(world, "`world`");
    auto made = std::make_unique<tessera_world>();
    made->world = std::make_shared<World>(init({.backend = backend ? backend : ""}));
    if (rank) *rank = made->world->rank();
    if (size) *size = made->world->size();
    *world = made.release();
  });
}

tessera_status tessera_shard(tessera_world* world, const char* const* names, void* const* tensors,
                             int64_t parameters, int64_t buffers, const char* plan,
                             const char* optimizer, tessera_model** model) {
  return run("tessera_shard", [&] {
    auto made = std::make_unique<tessera_model>();
    made->world = given(world, "`world`")->world;
    ShardPlan how;
    std::vector<NamedTensor> own, held;
    check_on_all_ranks(ShardMesh(made->world->process_group(), nullptr), [&] {
      given(model, "`model`");
      own = named(names, tensors, 0, parameters);
      held = named(names, tensors, parameters, parameters + buffers);
      how = plan_of(plan);
      if (optimizer) made->inner = make_optimizer(optimizer, own, how);
    });
    how.process_group = made->world->process_group();
    for (const auto& [name, tensor] : own) made->parameters.emplace(name, tensor);
    made->sharded = fully_shard(std::move(own), std::move(held), how);
    try {
      if (optimizer)
        made->optimizer = std::make_unique<ShardedOptimizer>(*made->sharded, *made->inner);
    } catch (...) {
      made->sharded->unwrap();
      throw;
    }
    *model = made.release();
  });
}

tessera_status tessera_zero_grad(tessera_model* model) {
  return run("tessera_zero_grad", [&] { given(model, "`model`")->sharded->zero_grad(); });
}

tessera_status tessera_clip(tessera_model* model, double max_norm, double norm_type, double* norm) {
  return run("tessera_clip", [&] {
    const double before = given(model, "`model`")->sharded->clip_grad_norm_(max_norm, norm_type);
    if (norm) *norm = before;
  });
}

tessera_status tessera_step(tessera_model* model, double lr) {
  return run("tessera_step", [&] {
    given(given(model, "`model`")->optimizer.get(), "the optimizer of `model`");
    if (lr >= 0) set_learning_rate(*model->inner, 0, lr);
    model->optimizer->step();
  });
}

tessera_status tessera_save(tessera_model* model, const char* path) {
  return run("tessera_save", [&] {
    const auto& optimizer = given(model, "`model`")->optimizer;
    save_checkpoint(given(path, "`path`"), *model->sharded, optimizer.get());
  });
}

tessera_status tessera_load(tessera_model* model, const char* path, int64_t* steps) {
  return run("tessera_load", [&] {
    const auto& optimizer = given(model, "`model`")->optimizer;
    load_checkpoint(given(path, "`path`"), *model->sharded, optimizer.get());
    if (steps) *steps = optimizer ? optimizer->steps() : 0;
  });
}

tessera_status tessera_gather(tessera_model* model, const char* name, void* tensor) {
  return run("tessera_gather", [&] {
    const auto& known = given(model, "`model`")->parameters;
    const auto found = known.find(given(name, "`name`"));
    TORCH_CHECK_VALUE(found != known.end(), "the model has no parameter '", name, "'");
    auto* const result = static_cast<at::Tensor*>(given(tensor, "`tensor`"));
    *result = model->sharded->full_value(found->second);
  });
}

tessera_status tessera_memory(tessera_model* model, tessera_bytes* bytes) {
  return run("tessera_memory", [&] {
    const auto& optimizer = given(model, "`model`")->optimizer;
    *given(bytes, "`bytes`") = std::bit_cast<tessera_bytes>(
        optimizer ? optimizer->memory() : model->sharded->memory());  // the same fields
  });
}

void tessera_free(void* handle) { delete static_cast<tessera_handle*>(handle); }
