#pragma once

#include <tessera/optimizer_state_dict.h>

#include <set>
#include <string>
#include <vector>

namespace tessera {

/// A parameter, or a part of one, and what an optimizer keeps for it.
struct ParamValues {
  std::string param;  ///< its name
  std::vector<int64_t> sizes;
  const OptimizerStateDict::Values& values;
};

/// The names of values that are not of the shape of their parameter, although that has more than
/// one element.
std::set<std::string> names_of_others(const std::vector<ParamValues>& params);

/// True for a tensor with a value for each element of what it was kept for. `others`: of
/// `names_of_others()`; they tell a count of one element from what was kept for a single element.
bool is_elementwise(const std::string& name, const c10::IValue& value, at::IntArrayRef sizes,
                    const std::set<std::string>& others);

/// Throws `c10::ValueError` where a tensor fits no optimizer of these parameters: it is not of its
/// parameter's shape, and
/// - another of its name is, or
/// - it has more than one element, and neither do all of its name have one shape, nor are its
///   lengths those of the parameter (as with a value for each row).
void check_shapes(const std::vector<ParamValues>& params, const char* function);

}  // namespace tessera
