#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace tessera::testing::sim {

/// What a rank brings to a collective: its form, which must be that of the other ranks, and the
/// tensors that they read.
struct Offer {
  std::string form;
  std::vector<at::Tensor> inputs;
};

/// The ranks of a process group, which meet here for each of their collectives.
class MeetingPlace {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  explicit MeetingPlace(int size) : size_(size) {}

  /// Returns the offers of all ranks to collective `number`, once all have come. Throws
  /// `c10::DistBackendError` on all ranks if one does not come in time or has another form.
  const std::vector<Offer>& meet(uint64_t number, int rank, Offer offer, Deadline deadline);

  /// Returns once all ranks have read the offers, whose tensors may then be overwritten.
  void part(uint64_t number, Deadline deadline);

  /// Fails the collectives that have begun, and all later ones.
  void abort();

 private:
  struct Meeting {
    std::vector<std::optional<Offer>> come;
    std::vector<Offer> offers;  // once all have come
    int parting = 0;
    int parted = 0;
    std::string failure;
  };
  template <class Condition>
  void wait(std::unique_lock<std::mutex>& lock, Meeting& meeting, Deadline deadline,
            const Condition& condition, const char* expected);

  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, Meeting> meetings_;
  bool is_aborted_ = false;
};

/// The place of all ranks that name this token, while one of them keeps it.
std::shared_ptr<MeetingPlace> meeting_place(const std::string& token, int size);

}  // namespace tessera::testing::sim
