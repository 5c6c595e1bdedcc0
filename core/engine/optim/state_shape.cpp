#include "engine/optim/state_shape.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <map>

#include "engine/optim/small_state.h"

namespace tessera {
namespace {

// All tensors of one name.
struct Named {
  std::vector<const ParamValues*> params;
  std::vector<at::Tensor> tensors;
};

bool has_lengths_of(at::IntArrayRef sizes, at::IntArrayRef param) {
  return std::all_of(sizes.begin(), sizes.end(), [&](int64_t size) {
    return size == 1 || std::find(param.begin(), param.end(), size) != param.end();
  });
}

bool is_several(at::IntArrayRef sizes) { return c10::multiply_integers(sizes) > 1; }

// Returns true if all tensors of the name have one shape although their parameters differ in
// theirs.
bool have_one_shape(const Named& named) {
  const auto differs = [&](const auto& items, auto&& sizes_of) {
    return std::any_of(items.begin(), items.end(),
                       [&](const auto& item) { return sizes_of(item) != sizes_of(items.front()); });
  };
  return differs(named.params, [](const ParamValues* param) { return param->sizes; }) &&
         !differs(named.tensors, [](const at::Tensor& tensor) { return tensor.sizes(); });
}

void check_named(const std::string& name, const Named& named, bool may_fit_by_chance,
                 const char* function) {
  bool any_fits = false;
  for (size_t i = 0; i < named.params.size() && !may_fit_by_chance; ++i) {
    const auto param = state_sizes(name, named.params[i]->sizes);
    any_fits =
        any_fits || (is_several(param) && named.tensors[i].sizes() == at::IntArrayRef(param));
  }
  const bool one_shape = have_one_shape(named);
  for (size_t i = 0; i < named.params.size(); ++i) {
    const auto own = state_sizes(name, named.params[i]->sizes);
    const at::IntArrayRef param = own, sizes = named.tensors[i].sizes();
    const bool is_single = named.tensors[i].numel() == 1;
    const bool fits = sizes == param || (is_single && !is_several(param)) ||
                      (!any_fits && (is_single || one_shape || has_lengths_of(sizes, param)));
    TORCH_CHECK_VALUE(fits, "[", function, "] the state must fit the parameters; expected '", name,
                      "' of '", named.params[i]->param, "' in the shape ", param, ", got ", sizes);
  }
}

}  // namespace

bool is_scale(const std::string& name) {
  return name == "exp_avg_scale" || name == "exp_avg_sq_scale";
}

std::vector<int64_t> state_sizes(const std::string& name, at::IntArrayRef sizes) {
  if (!is_scale(name)) return sizes.vec();
  return {blocks_of(c10::multiply_integers(sizes))};
}

std::set<std::string> names_of_others(const std::vector<ParamValues>& params) {
  std::set<std::string> names;
  for (const ParamValues& param : params) {
    if (!is_several(param.sizes)) continue;
    for (const auto& [name, value] : param.values)
      if (!is_elementwise(name, value, param.sizes, {})) names.insert(name);
  }
  return names;
}

bool is_elementwise(const std::string& name, const c10::IValue& value, at::IntArrayRef sizes,
                    const std::set<std::string>& others) {
  if (!value.isTensor()) return false;
  if (value.toTensor().sizes() != at::IntArrayRef(state_sizes(name, sizes))) return false;
  return is_several(sizes) || !others.contains(name);
}

void check_shapes(const std::vector<ParamValues>& params, const char* function,
                  const std::set<std::string>& others, bool may_fit_by_chance) {
  std::map<std::string, Named> by_name;
  for (const ParamValues& param : params) {
    for (const auto& [name, value] : param.values) {
      if (!value.isTensor()) continue;
      by_name[name].params.push_back(&param);
      by_name[name].tensors.push_back(value.toTensor());
    }
  }
  for (const auto& [name, named] : by_name)
    if (!others.contains(name)) check_named(name, named, may_fit_by_chance, function);
}

}  // namespace tessera
