#pragma once

#include <tessera/engine/shard_plan.h>

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "engine/unit/layout.h"

namespace tessera {

/// Returns true if a name fits a pattern, in which `*` stands for any characters.
bool fits_pattern(std::string_view pattern, std::string_view name);

/// Throws unless all `names`, of one member of the plan, are the model's.
void check_known(const std::vector<ParamSlot>& params, const char* member,
                 std::set<std::string> names);

/// Sets the ranks that share each parameter, by the plan. Throws for a rule that fits no parameter.
void choose_groups(std::vector<ParamSlot>& params, const ShardPlan& plan);

/// Sets where each parameter may be cut, by the plan's rules. Throws for rules that can't be
/// honoured.
void choose_cuts(std::vector<ParamSlot>& params, const ShardPlan& plan);

/// Returns each whole parameter's owner: the plan's, or else the rank with the least work so far,
/// the lowest of equals. For other parameters the number has no meaning. `sizes`: the number of
/// ranks of each group.
std::vector<int> choose_owners(const std::vector<ParamSlot>& params, const ShardPlan& plan,
                               const std::map<int, int>& sizes);

/// Returns the rank of a whole parameter; -1 for parameters that may be cut, and empty ones.
int owner_of(const UnitLayout& unit, const ParamSlot& slot);

/// Returns where a parameter may be cut, and its owner if it has one: "whole, on rank 2".
std::string cut_text(Cut cut, int64_t block, int owner);

/// Sets the offsets of a unit's slots, which come in the order of registration, and the bounds of
/// ranks; may reorder the slots. `owners`: of the slots. `loads`: the elements of each rank in the
/// units before; adds those in this one, unless all ranks have equally many. See [Note: Flat
/// layout] in placement.cpp.
void place(UnitLayout& unit, const std::vector<int>& owners, std::vector<int64_t>& loads);

}  // namespace tessera
