#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comm/group/progress.h"

namespace tessera {

/// A wait of a rank, as other ranks see it.
struct WaitView {
  CollectiveId id;
  std::string subject;       ///< "all_gather #41 of unit 'blocks.3'"
  double seconds = 0;        ///< so long already
  std::vector<int> lacking;  ///< ranks that have not issued the collective, as far as it knows
};

/// A rank, as another one sees it.
struct RankView {
  int rank = -1;
  /// Since its last answer; negative: it never answered.
  double silent_seconds = -1;
  Phase phase = Phase::kUserCode;
  int64_t step = 0;  ///< 0: unknown
  double phase_seconds = 0;
  std::string last;  ///< its last collective, like `WaitView::subject`
  /// All of its threads that issue collectives are waiting.
  bool is_blocked = false;
  std::optional<WaitView> wait;  ///< the oldest one
};

/// Returns "forward of step 5".
std::string place_text(Phase phase, int64_t step);

/// Returns one line that says where the ranks are for which rank `own` waits. `views`: the other
/// ranks of the process group.
std::string wait_report(const RankView& own, const std::vector<RankView>& views);

/// Returns the ranks of a cycle that includes `own`, in its order: each waits for the next one, and
/// can issue nothing meanwhile. Empty if there is none. Only waits of at least `min_seconds` count.
std::vector<int> wait_cycle(const RankView& own, const std::vector<RankView>& views,
                            double min_seconds);

}  // namespace tessera
