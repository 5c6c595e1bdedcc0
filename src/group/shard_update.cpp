#include "group/shard_update.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>

namespace tessera {
namespace {

constexpr int kMaxRules = 8;

std::atomic<UpdateRule>& rule_of(int number) {
  static std::array<std::atomic<UpdateRule>, kMaxRules> rules{};
  TORCH_INTERNAL_ASSERT(number >= 0 && number < kMaxRules);
  return rules[number];
}

}  // namespace

void set_update_rule(int number, UpdateRule rule) { rule_of(number) = rule; }

void compute(std::span<const ShardUpdate> updates) {
  for (auto first = updates.begin(); first != updates.end();) {
    const int number = first->rule;
    const auto end = std::find_if(first, updates.end(),
                                  [&](const ShardUpdate& update) { return update.rule != number; });
    const UpdateRule rule = rule_of(number);
    TORCH_INTERNAL_ASSERT(rule);
    rule({first, end});
    first = end;
  }
}

}  // namespace tessera
