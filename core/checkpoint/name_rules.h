#pragma once

#include <tessera/checkpoint/rename_rule.h>

#include <functional>
#include <map>
#include <regex>
#include <string>
#include <vector>

#include "checkpoint/index.h"

namespace tessera {

/// The compiled form of `RenameRules`.
class NameRules {
 public:
  /// `option`: the option's name, for messages. Throws `c10::ValueError`, naming the rule, for one
  /// that is no regular expression, or has both a pattern and names.
  NameRules(const RenameRules& rules, const char* option);
  std::string apply(std::string name) const;

 private:
  struct Rule {
    std::regex pattern;
    std::string replacement;
    std::map<std::string, std::string> names;
    std::string apply(const std::string& name) const;
  };
  std::vector<Rule> rules_;
};

/// Gives the tensors and the optimizer's parameters of an index new names, and removes those whose
/// names all become empty. `path` is for messages. Throws `c10::ValueError` if two tensors get one
/// name.
void rename_tensors(CheckpointIndex& index, const std::string& path,
                    const std::function<std::string(const std::string&)>& rename);

/// Describes the tensors whose whole name one of the regular expressions matches as ones that are
/// stored transposed. Throws `c10::ValueError`, naming the tensor, if one has not two dims.
void transpose_tensors(CheckpointIndex& index, const std::vector<std::string>& patterns);

/// Returns the name in `names` that is most similar to `name`; empty if none is similar.
std::string most_similar(const std::string& name, const std::vector<std::string>& names);

}  // namespace tessera
