#include "engine/grad/lockstep.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <compare>
#include <map>
#include <sstream>
#include <utility>

#include "comm/group/ranks_text.h"
#include "engine/unit/agreement.h"

namespace tessera {

// [Note: Ranks that are behind]
//
// Collectives pair up by their order, so a rank that skips a step goes on with the others: its
// backward of step 4 is reduced with their backward of step 5. Where step() sends nothing, nothing
// else shows it. So the agreement at the end of a backward carries the number of steps. As the
// ranks take the highest byte, each sends the number and its complement, and so learns the lowest:
// two bytes show whether any rank differs, however many there are. Only if one does, the ranks
// gather all numbers.
//
// The number of steps is that of this model since it was sharded. The steps that an optimizer
// counts may come from a checkpoint, and a model may have several optimizers.
//
// The number of backwards that were reduced is the same on all ranks, because each is an agreement.
// A rank that skips a batch after its forward is therefore seen by its forwards only. These may
// differ for good reasons (an evaluation without NoGradGuard, a loss of several forwards), so that
// is a warning. Forwards count that go through the handle, and backwards under no_sync(), of which
// each rank may make its own number, are subtracted. A batch that is skipped before its forward
// leaves no trace.
//
// Backends of devices do not compare collectives. A rank that catches an exception in the middle of
// a forward and goes on with another has gathered some units twice, and what others gather goes to
// the wrong parameters. So the number of gathers up to the end of the last pass is compared, too.
//
// Where each rank updates its own part, a learning rate or a bound for clipping that one rank alone
// has, or gradients that it alone clears, change that part and nothing else: each part would be
// trained by other rules. So calls that must be the same on all ranks are recorded with their
// values, and a hash of 16 bits is compared. It misses one difference of 65,536.
namespace {

constexpr size_t kListedRanks = 8;
constexpr size_t kListedCalls = 8;
constexpr int kHighest = 255;

// The numbers of one rank.
struct Numbers {
  int64_t steps = 0, reductions = 0, forwards = 0, backwards = 0, gathers = 0;
  auto operator<=>(const Numbers&) const = default;
};

// Ranks by their numbers, those with the fewest steps first. Ranks that are done have sent none.
using RanksByNumbers = std::map<Numbers, std::vector<size_t>>;

template <class F>
RanksByNumbers group_ranks(const std::vector<std::string>& texts, F&& of_interest) {
  RanksByNumbers groups;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    Numbers all;
    std::istringstream stream(texts[rank]);
    if (stream >> all.steps >> all.reductions >> all.forwards >> all.backwards >> all.gathers)
      groups[of_interest(all)].push_back(rank);
  }
  return groups;
}

// Returns "rank 1" or "ranks 0, 2", and the verb that follows.
std::string ranks_that(const std::vector<size_t>& ranks, const char* one, const char* several) {
  return ranks_text(ranks, kListedRanks) + " " + (ranks.size() == 1 ? one : several);
}

std::string counted(int64_t number, const char* thing) {
  return fmt::format("{} {}{}", number, thing, number == 1 ? "" : "s");
}

uint8_t complement(uint8_t byte) { return static_cast<uint8_t>(kHighest - byte); }

bool differs(const uint8_t* highest) { return highest[0] + highest[1] != kHighest; }

}  // namespace

void Lockstep::end_step() {
  ++steps_;
  reductions_ = 0;
}

void Lockstep::record(std::string call) {
  const size_t hash = std::hash<std::string>()(call) + 31 * size_t{calls_hash_};
  calls_hash_ = static_cast<uint16_t>(hash ^ (hash >> 16) ^ (hash >> 32) ^ (hash >> 48));
  last_calls_.push_back(std::move(call));
  if (last_calls_.size() > kListedCalls) last_calls_.pop_front();
}

void Lockstep::append_to(std::vector<uint8_t>& message, bool done) {
  is_done_ = done;
  ++reductions_;
  if (done) {
    message.insert(message.end(), kBytes, 0);
    return;
  }
  const auto steps = static_cast<uint8_t>(steps_ % (kHighest + 1));
  const int64_t more = std::clamp<int64_t>(forwards_ - backwards_, -100, 100);
  const auto forwards = static_cast<uint8_t>(more + 100);
  const auto gathers = static_cast<uint8_t>(gathers_ % (kHighest + 1));
  const auto low = static_cast<uint8_t>(calls_hash_), high = static_cast<uint8_t>(calls_hash_ >> 8);
  for (const uint8_t byte : {steps, forwards, gathers, low, high}) {
    message.push_back(byte);
    message.push_back(complement(byte));
  }
}

void Lockstep::compare(const uint8_t* highest, const ShardMesh& mesh) {
  error_.clear();
  const bool steps_differ = differs(highest);
  const bool forwards_differ = differs(highest + 2) && !warned_;
  const bool gathers_differ = differs(highest + 4);
  const bool calls_differ = differs(highest + 6) || differs(highest + 8);
  if (steps_differ || forwards_differ || gathers_differ) {
    const auto all =
        mesh.all_gather_bytes(is_done_ ? "" : numbers(), {"steps taken", Channel::kControl});
    if (steps_differ) {
      error_ = step_error(all);
    } else if (gathers_differ) {
      error_ = gather_error(all);
      has_lost_gathers_ = true;
    } else {
      warned_ = true;
      if (mesh.rank() == 0) TORCH_WARN(forward_warning(all));
    }
  }
  // After an error, ranks that were behind make the calls that the others have made.
  if (error_.empty() && calls_differ && !was_wrong_) error_ = call_error(mesh);
  was_wrong_ = !error_.empty();
  forwards_ = 0;
  backwards_ = 0;
  calls_hash_ = 0;
  last_calls_.clear();
}

void Lockstep::check() {
  const std::string error = std::exchange(error_, "");
  TORCH_CHECK(error.empty(), error);
}

std::string Lockstep::numbers() const {
  return fmt::format("{} {} {} {} {}", steps_, reductions_, forwards_.load(), backwards_, gathers_);
}

std::string Lockstep::step_error(const std::vector<std::string>& all) const {
  const RanksByNumbers groups = group_ranks(
      all, [](const Numbers& n) { return Numbers{.steps = n.steps, .reductions = n.reductions}; });
  std::vector<std::string> places;
  std::vector<size_t> behind;
  for (const auto& [n, ranks] : groups) {
    places.push_back(fmt::format("{} in backward {} of step {}", ranks_that(ranks, "is", "are"),
                                 n.reductions, n.steps + 1));
    if (n.steps == groups.begin()->first.steps)
      behind.insert(behind.end(), ranks.begin(), ranks.end());
  }
  std::sort(behind.begin(), behind.end());
  return fmt::format(
      "[backward] all ranks must be in the same step; {}, counted since the model was sharded: {} "
      "skipped a step, or made more backwards before it than the other ranks (noticed by the "
      "all_reduce at the end of backward)",
      fmt::join(places, ", "), ranks_that(behind, "has", "have"));
}

std::string Lockstep::gather_error(const std::vector<std::string>& all) const {
  std::vector<std::string> counts;
  for (const auto& [n, ranks] :
       group_ranks(all, [](const Numbers& n) { return Numbers{.gathers = n.gathers}; }))
    counts.push_back(fmt::format("{} {}", ranks_that(ranks, "has made", "have made"),
                                 counted(n.gathers, "gather")));
  return fmt::format(
      "[backward] all ranks must have gathered the same units by the end of the last backward; {}. "
      "A forward that failed, and after which its rank went on with another, gathers units twice. "
      "Parameters are wrong since then: start again from a checkpoint, and let an exception in a "
      "forward end the program (noticed by the all_reduce at the end of backward {} of step {})",
      fmt::join(counts, ", "), reductions_, steps_ + 1);
}

// Collective. Names the first call in which a rank differs from rank 0, among those that are kept.
std::string Lockstep::call_error(const ShardMesh& mesh) const {
  std::vector<std::string> own(last_calls_.begin(), last_calls_.end());
  if (is_done_) own.clear();
  std::string difference =
      first_difference(mesh, own, {"calls since the last backward", Channel::kControl});
  if (difference.empty()) difference = fmt::format("they differ before the last {}", kListedCalls);
  return fmt::format(
      "[backward] all ranks must make the same calls, with the same values, between two backwards; "
      "{}. Parts of the parameters that ranks update may differ since then: start again from a "
      "checkpoint (noticed by the all_reduce at the end of backward {} of step {})",
      difference, reductions_, steps_ + 1);
}

std::string Lockstep::forward_warning(const std::vector<std::string>& all) const {
  const RanksByNumbers groups = group_ranks(all, [](const Numbers& n) {
    return Numbers{.forwards = n.forwards, .backwards = n.backwards};
  });
  std::vector<std::string> parts;
  for (const auto& [n, ranks] : groups)
    parts.push_back(fmt::format("{} made {} and {}", ranks_that(ranks, "has", "have"),
                                counted(n.forwards, "forward"), counted(n.backwards, "backward")));
  return fmt::format(
      "[backward] in backward {} of step {}, counted since the model was sharded, ranks have made "
      "different numbers of forwards since the last reduction: {}. A rank that skips a batch after "
      "its forward ends before the others, which then wait for it. For an evaluation, call "
      "forward() under NoGradGuard. This warning is shown once per model",
      reductions_, steps_ + 1, fmt::join(parts, ", "));
}

}  // namespace tessera
