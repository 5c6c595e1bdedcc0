#pragma once

#include <array>
#include <deque>
#include <vector>

namespace tessera {

/// A rank's part of a collective: first inside its host, then over the host's link.
struct LinkTransfer {
  size_t channel = 0;       ///< below `LinkClock::kChannels`
  double host_seconds = 0;  ///< inside the host
  double nbytes = 0;        ///< sent by the host, over all of its ranks
  int rounds = 1;           ///< latencies until it is over
};

/// The time line of a rank that computes while collectives are under way over its host's link.
///
/// Each channel has its own queue, in the order of `start()`; a transfer begins when the bytes of
/// the one before it have been sent. The channels whose first transfer is
/// on the link share it equally. All ranks are equal, so the other direction is like this one.
class LinkClock {
 public:
  static constexpr size_t kChannels = 3;

  struct Rates {
    double bandwidth = 0;  ///< bytes per second; 0: no limit
    double latency = 0;
    /// Processor time of the rank, for each byte that its host sends.
    double processor_seconds_per_byte = 0;
  };

  explicit LinkClock(const Rates& rates) : rates_(rates) {}

  double now() const { return now_; }
  double sent_nbytes() const { return sent_; }

  /// Starts a transfer, and returns its number.
  size_t start(const LinkTransfer& transfer);
  bool is_over(size_t transfer) const { return transfers_[transfer].is_over; }

  /// Lets the rank compute for so many seconds, or longer if messages take processor time.
  void compute(double seconds);
  void wait(size_t transfer);
  /// As above, but for at most `longest` seconds.
  void pause(size_t transfer, double longest);

 private:
  enum class Stage { kHost, kLink, kFlight };
  struct State {
    LinkTransfer transfer;
    Stage stage = Stage::kHost;
    double left = 0;  // seconds, or bytes at kLink
    bool is_over = false;
  };
  // How fast time passes for the link's bytes, for each of those that share it, and for the rank.
  struct Speed {
    double channel = 0, rank = 1;
  };

  void settle();
  bool proceed(State& state);
  Speed speed(bool computes) const;
  std::vector<size_t> active() const;
  double seconds_left(const State& state, const Speed& speed) const;
  void advance(double seconds, const Speed& speed);
  double next_event(const Speed& speed) const;

  const Rates rates_;
  double now_ = 0, sent_ = 0;
  std::vector<State> transfers_;
  std::array<std::deque<size_t>, kChannels> queues_;
  std::vector<size_t> in_flight_;  // sent, but not arrived
};

}  // namespace tessera
