#include "support/sim_device/meeting.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "support/sim_device/streams.h"

namespace tessera::testing::sim {
namespace {

// Of the ranks that have not come.
std::string missing_ranks(const std::vector<std::optional<Offer>>& come) {
  std::string ranks;
  for (size_t r = 0; r < come.size(); ++r)
    if (!come[r]) ranks += (ranks.empty() ? "rank " : ", rank ") + std::to_string(r);
  return ranks;
}

// Empty if all forms are equal.
std::string difference(const std::vector<Offer>& offers) {
  for (size_t r = 1; r < offers.size(); ++r)
    if (offers[r].form != offers[0].form)
      return "ranks issued different collectives: rank 0 " + offers[0].form + ", rank " +
             std::to_string(r) + " " + offers[r].form;
  return {};
}

}  // namespace

template <class Condition>
void MeetingPlace::wait(std::unique_lock<std::mutex>& lock, Meeting& meeting, Deadline deadline,
                        const Condition& condition, const char* expected) {
  constexpr std::chrono::milliseconds kPoll(20);  // for the end of the program
  while (!condition() && meeting.failure.empty()) {
    const auto now = std::chrono::steady_clock::now();
    if (is_aborted_ || is_ending()) meeting.failure = "aborted";
    if (now >= deadline) meeting.failure = missing_ranks(meeting.come) + expected;
    if (meeting.failure.empty()) changed_.wait_until(lock, std::min(deadline, now + kPoll));
  }
  if (!meeting.failure.empty()) changed_.notify_all();
}

const std::vector<Offer>& MeetingPlace::meet(uint64_t number, int rank, Offer offer,
                                             Deadline deadline) {
  std::unique_lock lock(mutex_);
  Meeting& meeting = meetings_[number];
  meeting.come.resize(size_);
  const std::string form = offer.form;
  meeting.come[rank] = std::move(offer);
  const auto have_all_come = [&] {
    return std::ranges::all_of(meeting.come, [](const auto& o) { return o.has_value(); });
  };
  if (have_all_come() && meeting.failure.empty()) {
    for (const auto& come : meeting.come) meeting.offers.push_back(*come);
    meeting.failure = difference(meeting.offers);
    changed_.notify_all();
  }
  wait(lock, meeting, deadline, have_all_come, " did not come in time");
  TORCH_CHECK_WITH(DistBackendError, meeting.failure.empty(), "[simccl] collective ", number, " (",
                   form, ", rank ", rank, " of ", size_, "): ", meeting.failure);
  return meeting.offers;
}

void MeetingPlace::part(uint64_t number, Deadline deadline) {
  std::unique_lock lock(mutex_);
  Meeting& meeting = meetings_.at(number);
  ++meeting.parting;
  changed_.notify_all();
  wait(
      lock, meeting, deadline, [&] { return meeting.parting == size_; },
      "another rank did not read in time");
  const std::string failure = meeting.failure;
  if (++meeting.parted == size_) meetings_.erase(number);
  TORCH_CHECK_WITH(DistBackendError, failure.empty(), "[simccl] collective ", number, ": ",
                   failure);
}

void MeetingPlace::abort() {
  std::lock_guard lock(mutex_);
  is_aborted_ = true;
  changed_.notify_all();
}

std::shared_ptr<MeetingPlace> meeting_place(const std::string& token, int size) {
  static auto& places = *new std::map<std::string, std::weak_ptr<MeetingPlace>>;
  static auto& mutex = *new std::mutex;
  std::lock_guard lock(mutex);
  std::shared_ptr<MeetingPlace> place = places[token].lock();
  if (!place) places[token] = place = std::make_shared<MeetingPlace>(size);
  return place;
}

}  // namespace tessera::testing::sim
