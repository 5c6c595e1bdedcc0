#pragma once

#include <tessera/checkpoint/rename_rule.h>

#include <string>
#include <vector>

namespace tessera::tools {

/// Returns the rules of a file, then those of arguments `PATTERN=REPLACEMENT`, cut at their last
/// `=`. `file` may be empty: none.
///
/// The file is JSON: a list of rules, `[["PATTERN", "REPLACEMENT"], ...]`, or an object of whole
/// names, `{"NAME": "NEW NAME", ...}`, one rule. Throws `std::invalid_argument` for others.
RenameRules rename_rules_of(const std::string& file, const std::vector<std::string>& arguments);

}  // namespace tessera::tools
