#include "access/use_order.h"

#include <algorithm>
#include <limits>
#include <set>

namespace tessera {
namespace {

// Shortest common supersequence by dynamic programming; among equally short ones, the one that
// takes the lower unit first, which is where `insert_missing` would put it.
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

void insert_missing(PassOrder& pass, const std::vector<int>& all) {
  auto has = [](const UseOrder& order, int unit) {
    return std::find(order.begin(), order.end(), unit) != order.end();
  };
  for (const int unit : all) {
    if (has(pass.forward, unit) || has(pass.backward, unit)) continue;
    int before = unit - 1;
    while (before >= 0 && !has(pass.forward, before)) --before;
    auto after = std::find(pass.forward.begin(), pass.forward.end(), before);
    pass.forward.insert(before < 0 ? pass.forward.begin() : after + 1, unit);
    // In backward, it goes before the last use of that neighbour.
    auto last = std::find(pass.backward.rbegin(), pass.backward.rend(), before);
    pass.backward.insert(last == pass.backward.rend() ? pass.backward.end() : last.base() - 1,
                         unit);
  }
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
