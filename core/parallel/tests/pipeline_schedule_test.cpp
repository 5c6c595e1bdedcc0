// Schedules: bubbles and micro-batches under way by the formulas, and what is refused.

#include <gtest/gtest.h>
#include <tessera/parallel/pipeline.h>

#include <algorithm>
#include <string>
#include <vector>

#include "support/error_of.h"
#include "support/expect_contains.h"

namespace tessera::pipeline_schedule_test {

using testing::error_of;
using testing::expect_contains;
using enum PipelinePart;

TEST(PipelineSchedule, GpipeAndOneFOneBHaveTheBubbleOfAPassThroughAllOtherPlaces) {
  for (int64_t places = 1; places <= 6; ++places) {
    for (int64_t count = 1; count <= 9; ++count) {
      const auto gpipe = check_schedule(gpipe_schedule(places, count));
      const auto turns = check_schedule(one_f_one_b_schedule(places, count));
      for (int64_t p = 0; p < places; ++p) {
        EXPECT_EQ(gpipe[p], (PipelineCounts{3 * (count + places - 1), 3 * count, count}));
        EXPECT_EQ(turns[p], (PipelineCounts{3 * (count + places - 1), 3 * count,
                                            std::min(places - p, count)}));
      }
    }
  }
}

TEST(PipelineSchedule, InterleavingDividesTheBubbleByTheStagesOfAPlace) {
  for (int64_t places = 2; places <= 5; ++places) {
    for (int64_t stages = 1; stages <= 4; ++stages) {
      for (int64_t rounds = 2; rounds <= 4; ++rounds) {
        const int64_t count = rounds * places;
        const auto counts = check_schedule(interleaved_schedule(places, stages, count));
        for (int64_t p = 0; p < places; ++p) {
          EXPECT_EQ(counts[p].busy, 3 * count * stages);
          // In ticks of one stage, of which a pass through all of a place's takes `stages` times as
          // many.
          EXPECT_EQ(counts[p].ticks - counts[p].busy, 3 * (places - 1));
          EXPECT_EQ(counts[p].peak_in_flight,
                    std::min(2 * (places - 1 - p) + (stages - 1) * places + 1, count * stages));
        }
      }
    }
  }
}

TEST(PipelineSchedule, ZeroBubbleIdlesForAForwardAtEachOtherPlace) {
  for (int64_t places = 1; places <= 6; ++places) {
    for (int64_t count = 1; count <= 9; ++count) {
      const auto counts = check_schedule(zero_bubble_schedule(places, count));
      for (int64_t p = 0; p < places; ++p) {
        EXPECT_EQ(counts[p].busy, 3 * count);
        EXPECT_EQ(counts[p].peak_in_flight, std::min(places, count));
        EXPECT_EQ(counts[p].ticks - counts[p].busy,
                  places - 1 + std::max<int64_t>(places - count, 0));
      }
    }
  }
}

TEST(PipelineSchedule, IsDataThatCanBeReadAndWrittenByHand) {
  EXPECT_EQ(to_string(one_f_one_b_schedule(2, 2)), "F0.0 F0.1 B0.0 B0.1\nF1.0 B1.0 F1.1 B1.1\n");
  EXPECT_EQ(to_string(zero_bubble_schedule(2, 2)),
            "F0.0 F0.1 I0.0 W0.0 I0.1 W0.1\nF1.0 I1.0 F1.1 I1.1 W1.0 W1.1\n");
  // Two stages at each place, in the shape of a V.
  const PipelineSchedule v = {
      {{kForward, 0, 0}, {kForward, 3, 0}, {kBackward, 3, 0}, {kBackward, 0, 0}},
      {{kForward, 1, 0}, {kForward, 2, 0}, {kBackward, 2, 0}, {kBackward, 1, 0}}};
  EXPECT_EQ(check_schedule(v)[0].ticks, 12);
  EXPECT_EQ(stages_at(v, 0), (std::vector<int64_t>{0, 3}));
}

TEST(PipelineSchedule, RefusesWhatCannotRun) {
  const auto refused = [](const PipelineSchedule& schedule, const std::string& why) {
    expect_contains(error_of([&] { check_schedule(schedule); }), {"[check_schedule]", why});
  };
  const PipelineSchedule good = one_f_one_b_schedule(2, 2);
  PipelineSchedule bad = good;
  bad[0].push_back({kForward, 0, 0});
  refused(bad, "F0.0 twice");
  bad = good;
  bad[0].push_back({kForward, 1, 2});
  refused(bad, "F1.0 at another place");
  bad = good;
  bad[1].pop_back();
  refused(bad, "for stage 1 and micro-batch 1");
  bad = good;
  bad[1].push_back({kWeightGradient, 1, 1});
  refused(bad, "for stage 1 and micro-batch 1");
  bad = good;
  bad[1].back().part = kInputGradient;
  refused(bad, "for stage 1 and micro-batch 1");
  bad = good;
  for (PipelineAction& action : bad[1]) action.stage = 2;
  refused(bad, "for stage 1 and micro-batch 0");
  bad = good;
  bad[1].push_back({PipelinePart('x'), 1, 1});
  refused(bad, "expected 8 actions, got 9");
  bad = good;
  std::swap(bad[1][0], bad[1][1]);
  refused(bad, "for ever wait: place 0 at B0.0 place 1 at B1.0");
  refused({{{kForward, 0, 0}, {kInputGradient, 0, 0}, {kBackward, 0, 0}}}, "micro-batch 0");
  refused({}, "expected 0 actions");
  expect_contains(error_of([] { gpipe_schedule(2, 0); }), {"[gpipe_schedule]", "0 micro-batches"});
  expect_contains(error_of([] { interleaved_schedule(2, 2, 3); }),
                  {"[interleaved_schedule]", "multiple of the 2 places; got 3"});
}

}  // namespace tessera::pipeline_schedule_test
