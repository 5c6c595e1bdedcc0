#pragma once

#include <tessera/engine/optimizer_state_dict.h>

#include <set>
#include <string>
#include <vector>

namespace tessera {

/// A parameter, or a part of one, and an optimizer's values for it.
struct ParamValues {
  std::string param;  ///< its name
  std::vector<int64_t> sizes;
  const OptimizerStateDict::Values& values;
};

/// Returns true for the scales of 8-bit state (see small_state.h): one element for each block of
/// the parameter, whose blocks no rank cuts.
bool is_scale(const std::string& name);
/// Returns the shape of the tensor of this name for a parameter or part of the shape `sizes`.
std::vector<int64_t> state_sizes(const std::string& name, at::IntArrayRef sizes);

/// Returns the names of values that do not have the shape of their parameter, although the
/// parameter has more than one element.
std::set<std::string> names_of_others(const std::vector<ParamValues>& params);

/// Returns true for a tensor with a value for each element, or block, of its parameter or part, of
/// shape `sizes`. `others`: from `names_of_others()`; distinguishes a count of one element from
/// state of a single element.
bool is_elementwise(const std::string& name, const c10::IValue& value, at::IntArrayRef sizes,
                    const std::set<std::string>& others);

/// Throws `c10::ValueError` for a tensor that fits no optimizer of these parameters: it does not
/// have its parameter's shape, and
/// - another tensor of its name does, unless `may_fit_by_chance`, as a square one may, or
/// - it has more than one element, and neither do all tensors of its name have one shape, nor are
///   its lengths those of the parameter (as with a value for each row).
/// Those named in `others` may have any shape.
void check_shapes(const std::vector<ParamValues>& params, const char* function,
                  const std::set<std::string>& others = {}, bool may_fit_by_chance = false);

}  // namespace tessera
