#include "engine/access/use_order.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <utility>

namespace tessera {
namespace {

constexpr size_t kRememberedPasses = 8;

// A unit, and the number of its earlier uses in the pass.
using Use = std::pair<int, int>;

std::vector<Use> numbered(const UseOrder& order) {
  std::map<int, int> count;
  std::vector<Use> uses;
  for (const int unit : order) uses.emplace_back(unit, count[unit]++);
  return uses;
}

// Sorts the uses of the first of `passes`, each the orders of some ranks, and of as many after it
// as do not contradict it. Returns nothing if the first contradicts itself.
std::optional<UseOrder> sort_passes(const std::vector<std::vector<UseOrder>>& passes,
                                    const UseOrder& known) {
  for (size_t count = passes.size(); count > 0; --count) {
    std::set<UseOrder> orders;  // most ranks have the same
    for (size_t i = 0; i < count; ++i) orders.insert(passes[i].begin(), passes[i].end());
    if (auto sorted = sort_uses({orders.begin(), orders.end()}, known)) return sorted;
  }
  return std::nullopt;
}

// Where ranks contradict each other, each rank's uses are sorted by themselves.
UseOrder merge_passes(const std::vector<std::vector<UseOrder>>& passes, const UseOrder& known) {
  if (auto sorted = sort_passes(passes, known)) return *sorted;
  std::vector<UseOrder> of_ranks;
  for (size_t rank = 0; rank < passes.front().size(); ++rank) {
    std::vector<std::vector<UseOrder>> own;
    for (const auto& ranks : passes) own.push_back({ranks[rank]});
    of_ranks.push_back(sort_passes(own, known).value());
  }
  return merge_orders(of_ranks);
}

UseOrder reversed(const UseOrder& order) { return {order.rbegin(), order.rend()}; }

// Shortest common supersequence by dynamic programming; among equally short ones, the one that
// takes the lower unit first, where `insert_missing` would put it.
UseOrder merge_two(const UseOrder& a, const UseOrder& b) {
  const size_t rows = a.size(), columns = b.size();
  std::vector<std::vector<int>> length(rows + 1, std::vector<int>(columns + 1));
  for (size_t i = rows + 1; i-- > 0;) {
    for (size_t j = columns + 1; j-- > 0;) {
      if (i == rows || j == columns) {
        length[i][j] = static_cast<int>(rows - i + columns - j);
      } else if (a[i] == b[j]) {
        length[i][j] = 1 + length[i + 1][j + 1];
      } else {
        length[i][j] = 1 + std::min(length[i + 1][j], length[i][j + 1]);
      }
    }
  }
  UseOrder merged;
  size_t i = 0, j = 0;
  auto takes_a = [&] {
    const int with_a = length[i + 1][j], with_b = length[i][j + 1];
    return with_a != with_b ? with_a < with_b : a[i] < b[j];
  };
  while (i < rows || j < columns) {
    if (i < rows && j < columns && a[i] == b[j]) {
      append_use(merged, a[i]), ++i, ++j;
    } else if (j == columns || (i < rows && takes_a())) {
      append_use(merged, a[i++]);
    } else {
      append_use(merged, b[j++]);
    }
  }
  return merged;
}

// Units that stay in memory beyond the planned window, and the positions of their uses.
class ResidentSet {
 public:
  ResidentSet(const UseOrder& order, const std::vector<int64_t>& nbytes, int64_t limit)
      : nbytes_(nbytes), limit_(limit), end_(order.size()), uses_(nbytes.size()) {
    for (size_t position = 0; position < order.size(); ++position)
      uses_[order[position]].push_back(position);
  }

  bool add(int unit) { return units_.insert(unit).second; }

  // Frees units outside `window` that exceed the limit or have no further use, farthest next use
  // first.
  std::vector<int> shrink(size_t position, const std::set<int>& window) {
    std::vector<int> idle;
    int64_t idle_bytes = 0;
    for (const int unit : units_) {
      if (window.contains(unit)) continue;
      idle.push_back(unit);
      idle_bytes += nbytes_[unit];
    }
    std::stable_sort(idle.begin(), idle.end(),
                     [&](int a, int b) { return next_use(a, position) > next_use(b, position); });
    std::vector<int> freed;
    for (const int unit : idle) {
      const bool never_used = next_use(unit, position) == end_;
      if (limit_ < 0 || (idle_bytes <= limit_ && !never_used)) continue;
      idle_bytes -= nbytes_[unit];
      units_.erase(unit);
      freed.push_back(unit);
    }
    return freed;
  }

 private:
  size_t next_use(int unit, size_t position) const {
    const auto next = std::lower_bound(uses_[unit].begin(), uses_[unit].end(), position);
    return next == uses_[unit].end() ? end_ : *next;
  }

  const std::vector<int64_t>& nbytes_;
  int64_t limit_;
  size_t end_;
  std::vector<std::vector<size_t>> uses_;  // positions, by unit
  std::set<int> units_;
};

}  // namespace

void append_use(UseOrder& order, int unit) {
  if (order.empty() || order.back() != unit) order.push_back(unit);
}

UseOrder merge_orders(const std::vector<UseOrder>& orders) {
  UseOrder merged;
  for (const UseOrder& order : orders) {
    if (order != merged) merged = merge_two(merged, order);
  }
  return merged;
}

UseOrder PassOrder::joined() const {
  UseOrder order = forward;
  for (const int unit : backward) append_use(order, unit);
  return order;
}

PassOrder registration_order(int units) {
  PassOrder pass;
  for (int unit = 0; unit < units; ++unit) pass.forward.push_back(unit);
  pass.backward.assign(pass.forward.rbegin(), pass.forward.rend());
  return pass;
}

void insert_missing(PassOrder& pass, const std::vector<int>& all, const UseOrder& known) {
  auto has = [](const UseOrder& order, int unit) {
    return std::find(order.begin(), order.end(), unit) != order.end();
  };
  int before = -1;  // the last one in `known` that `pass` has
  for (const int unit : known) {
    const bool is_missing = std::find(all.begin(), all.end(), unit) != all.end() &&
                            !has(pass.forward, unit) && !has(pass.backward, unit);
    const int previous = before;
    if (is_missing || has(pass.forward, unit)) before = unit;
    if (!is_missing) continue;
    auto after = std::find(pass.forward.begin(), pass.forward.end(), previous);
    pass.forward.insert(previous < 0 ? pass.forward.begin() : after + 1, unit);
    // In backward, it goes before the last use of that neighbour.
    auto last = std::find(pass.backward.rbegin(), pass.backward.rend(), previous);
    pass.backward.insert(last == pass.backward.rend() ? pass.backward.end() : last.base() - 1,
                         unit);
  }
}

std::optional<UseOrder> sort_uses(const std::vector<UseOrder>& orders, const UseOrder& known) {
  std::map<Use, std::set<Use>> following;
  std::map<Use, int> waits_for;  // how many uses come directly before
  for (const UseOrder& order : orders) {
    const Use* previous = nullptr;
    const std::vector<Use> uses = numbered(order);
    for (const Use& use : uses) {
      following[use];
      if (previous && following[*previous].insert(use).second) ++waits_for[use];
      previous = &use;
    }
  }
  std::map<Use, size_t> places;
  for (const Use& use : numbered(known)) places.emplace(use, places.size());
  std::set<std::pair<size_t, Use>> ready;
  const auto add = [&](const Use& use) {
    const auto place = places.find(use);
    ready.emplace(place == places.end() ? places.size() : place->second, use);
  };
  for (const auto& [use, uses] : following)
    if (waits_for[use] == 0) add(use);
  UseOrder sorted;
  size_t count = 0;
  for (; !ready.empty(); ++count) {
    const Use use = ready.extract(ready.begin()).value().second;
    append_use(sorted, use.first);
    for (const Use& next : following[use])
      if (--waits_for[next] == 0) add(next);
  }
  if (count < following.size()) return std::nullopt;
  return sorted;
}

void OrderHistory::add(std::vector<PassOrder> ranks) {
  if (std::count(ranks.begin(), ranks.end(), ranks.front()) == std::ssize(ranks)) passes_.clear();
  passes_.push_front(std::move(ranks));
  if (passes_.size() > kRememberedPasses) passes_.pop_back();
}

PassOrder OrderHistory::merged(const PassOrder& known) const {
  std::vector<std::vector<UseOrder>> forward, backward;
  for (const auto& ranks : passes_) {
    forward.emplace_back(), backward.emplace_back();
    for (const PassOrder& pass : ranks) {
      forward.back().push_back(pass.forward);
      backward.back().push_back(reversed(pass.backward));
    }
  }
  // Backward is sorted from its end: of two branches, it first meets the one that forward meets
  // last.
  return {merge_passes(forward, known.forward),
          reversed(merge_passes(backward, reversed(known.backward)))};
}

std::vector<ResidencyStep> plan_residency(const UseOrder& order, const std::vector<int64_t>& nbytes,
                                          int64_t resident_bytes, int prefetch) {
  std::vector<ResidencyStep> steps(order.size());
  ResidentSet resident(order, nbytes, resident_bytes);
  for (size_t position = 0; position < order.size(); ++position) {
    std::vector<int> wanted;
    for (size_t p = position; p < order.size() && p <= position + static_cast<size_t>(prefetch);
         ++p) {
      if (nbytes[order[p]] > 0) wanted.push_back(order[p]);
    }
    steps[position].free = resident.shrink(position, {wanted.begin(), wanted.end()});
    for (const int unit : wanted) {
      if (resident.add(unit)) steps[position].gather.push_back(unit);
    }
  }
  return steps;
}

std::vector<int> reduction_order(const UseOrder& arrivals, int units) {
  std::vector<int> order(units);
  for (int unit = 0; unit < units; ++unit) order[unit] = units - 1 - unit;
  auto last_entry = [&](int unit) {
    const auto it = std::find(arrivals.rbegin(), arrivals.rend(), unit);
    return it == arrivals.rend() ? arrivals.size() : arrivals.rend() - it - 1;
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return last_entry(a) < last_entry(b); });
  return order;
}

std::vector<int> expected_reduction_order(const UseOrder& forward, int units) {
  return reduction_order({forward.rbegin(), forward.rend()}, units);
}

std::vector<int64_t> gathered_bytes(const std::vector<ResidencyStep>& steps,
                                    const std::vector<int64_t>& nbytes) {
  std::vector<int64_t> bytes;
  int64_t now = 0;
  for (const ResidencyStep& step : steps) {
    for (const int unit : step.free) now -= nbytes[unit];
    for (const int unit : step.gather) now += nbytes[unit];
    bytes.push_back(now);
  }
  return bytes;
}

}  // namespace tessera
