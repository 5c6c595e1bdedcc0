#pragma once

#include <map>
#include <string>
#include <vector>

namespace tessera {

/// Replaces parts of a tensor's name: every match of `pattern`, a regular expression as of
/// `std::regex` (ECMAScript), becomes `replacement`, in which `$1` is the first group. `^` and `$`
/// match the ends of the name; dots of names are written `\.`.
///
/// A rule may have `names` instead: whole names and their new names, all replaced at once, so that
/// two can be exchanged.
///
/// A list of rules is applied in its order, each to the result of the one before. A tensor whose
/// name becomes empty is left out; two tensors that get one name are an error.
struct RenameRule {
  std::string pattern = {}, replacement = {};
  std::map<std::string, std::string> names = {};
};
using RenameRules = std::vector<RenameRule>;

}  // namespace tessera
