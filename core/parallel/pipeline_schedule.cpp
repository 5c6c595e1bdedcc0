#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <tessera/parallel/pipeline.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace tessera {
namespace {

using enum PipelinePart;
using Actions = std::vector<PipelineAction>;

std::string text_of(const PipelineAction& action) {
  return fmt::format("{}{}.{}", static_cast<char>(action.part), action.stage, action.micro_batch);
}

// Place p begins with `lead(p)` forwards; then forwards and backwards come in turns.
template <class Lead>
PipelineSchedule in_turns(const char* function, int64_t places, int64_t stages_per_place,
                          int64_t micro_batches, Lead lead) {
  TORCH_CHECK_VALUE(places > 0 && stages_per_place > 0 && micro_batches > 0, "[", function,
                    "] places, stages and micro-batches must be 1 at least; got ", places,
                    " places of ", stages_per_place, " stages, ", micro_batches, " micro-batches");
  PipelineSchedule schedule(places);
  for (int64_t p = 0; p < places; ++p) {
    Actions forwards, backwards;
    for (int64_t first = 0; first < micro_batches; first += places) {
      for (int64_t turn = 0; turn < stages_per_place; ++turn) {
        for (int64_t m = first; m < std::min(first + places, micro_batches); ++m) {
          forwards.push_back({kForward, turn * places + p, m});
          backwards.push_back({kBackward, (stages_per_place - 1 - turn) * places + p, m});
        }
      }
    }
    const auto count = std::ssize(forwards), ahead = std::min<int64_t>(lead(p), count);
    schedule[p].assign(forwards.begin(), forwards.begin() + ahead);
    for (int64_t i = 0; i < count; ++i) {
      if (ahead + i < count) schedule[p].push_back(forwards[ahead + i]);
      schedule[p].push_back(backwards[i]);
    }
  }
  return schedule;
}

// Checks that each stage has all of its actions, once and at one place. Returns the stages.
int64_t check_complete(const PipelineSchedule& schedule) {
  std::map<int64_t, const Actions*> places;
  std::set<PipelineAction> all;
  int64_t micro_batches = 0;
  for (const Actions& actions : schedule) {
    for (const PipelineAction& action : actions) {
      const bool is_new = all.insert(action).second;
      TORCH_CHECK_VALUE(
          is_new && places.try_emplace(action.stage, &actions).first->second == &actions,
          "[check_schedule] each action must be there once, and those of a stage at "
          "one place; got ",
          text_of(action), is_new ? " at another place than others" : " twice");
      micro_batches = std::max(micro_batches, action.micro_batch + 1);
    }
  }
  const auto stages = std::ssize(places);
  int64_t expected = 0;
  for (int64_t s = 0; s < stages; ++s) {
    for (int64_t m = 0; m < micro_batches; ++m) {
      const auto has = [&](PipelinePart part) { return all.contains({part, s, m}); };
      TORCH_CHECK_VALUE(
          has(kForward) && (has(kBackward) ? !has(kInputGradient) && !has(kWeightGradient)
                                           : has(kInputGradient) && has(kWeightGradient)),
          "[check_schedule] each of ", stages, " stages must have F and either B or I and W for ",
          "each of ", micro_batches, " micro-batches; got other actions for stage ", s,
          " and micro-batch ", m);
      expected += has(kBackward) ? 2 : 3;
    }
  }
  TORCH_CHECK_VALUE(expected > 0 && std::ssize(all) == expected,
                    "[check_schedule] stages and micro-batches must be numbered from 0 without "
                    "gaps, and parts be F, B, I or W; expected ",
                    expected, " actions, got ", all.size());
  return stages;
}

// Runs the actions of places, each as soon as those that it needs are done.
struct Simulation {
  const int64_t stages;
  std::map<PipelineAction, int64_t> done;  // and when

  // Returns true if an action may begin, and then sets the time to when it may.
  bool is_ready(const PipelineAction& action, int64_t& time) const {
    const auto [part, s, m] = action;
    const auto after = [&](PipelinePart of, int64_t stage) {
      const auto found = done.find({of, stage, m});
      if (found != done.end()) time = std::max(time, found->second);
      return found != done.end();
    };
    if (part == kForward) return s == 0 || after(kForward, s - 1);
    if (part == kWeightGradient) return after(kInputGradient, s);
    return after(kForward, s) &&
           (s + 1 == stages || after(kBackward, s + 1) || after(kInputGradient, s + 1));
  }
};

}  // namespace

PipelineSchedule gpipe_schedule(int64_t places, int64_t micro_batches) {
  return in_turns(__func__, places, 1, micro_batches, [&](int64_t) { return micro_batches; });
}

PipelineSchedule one_f_one_b_schedule(int64_t places, int64_t micro_batches) {
  return in_turns(__func__, places, 1, micro_batches, [&](int64_t p) { return places - 1 - p; });
}

PipelineSchedule interleaved_schedule(int64_t places, int64_t stages_per_place,
                                      int64_t micro_batches) {
  TORCH_CHECK_VALUE(places < 1 || micro_batches % places == 0,
                    "[interleaved_schedule] micro_batches must be a multiple of the ", places,
                    " places; got ", micro_batches,
                    ". Other orders can be written as a PipelineSchedule");
  return in_turns(__func__, places, stages_per_place, micro_batches, [&](int64_t p) {
    return 2 * (places - 1 - p) + (stages_per_place - 1) * places;
  });
}

PipelineSchedule zero_bubble_schedule(int64_t places, int64_t micro_batches) {
  PipelineSchedule schedule =
      in_turns(__func__, places, 1, micro_batches, [&](int64_t p) { return places - 1 - p; });
  for (int64_t p = 0; p < places; ++p) {
    Actions actions;
    for (const auto& [part, stage, m] : schedule[p]) {
      actions.push_back({part == kBackward ? kInputGradient : part, stage, m});
      // Place p keeps p gradients of weights back, for the idle time at its end.
      if (part == kBackward && m >= p) actions.push_back({kWeightGradient, stage, m - p});
    }
    for (int64_t m = std::max<int64_t>(micro_batches - p, 0); m < micro_batches; ++m)
      actions.push_back({kWeightGradient, p, m});
    schedule[p] = std::move(actions);
  }
  return schedule;
}

std::string to_string(const PipelineSchedule& schedule) {
  std::string text;
  for (const Actions& actions : schedule) {
    for (const PipelineAction& action : actions)
      text += (&action == actions.data() ? "" : " ") + text_of(action);
    text += '\n';
  }
  return text;
}

std::vector<PipelineCounts> check_schedule(const PipelineSchedule& schedule) {
  Simulation simulation{check_complete(schedule), {}};
  const size_t places = schedule.size();
  std::vector<PipelineCounts> counts(places);
  std::vector<int64_t> next(places), clock(places), in_flight(places);
  std::string waiting;
  for (bool moves = true; moves;) {
    moves = false;
    waiting.clear();
    for (size_t p = 0; p < places; ++p) {
      for (; next[p] < std::ssize(schedule[p]); ++next[p], moves = true) {
        const PipelineAction& action = schedule[p][next[p]];
        if (!simulation.is_ready(action, clock[p])) break;
        const int64_t ticks = action.part == kBackward ? 2 : 1;
        simulation.done[action] = clock[p] += ticks;
        counts[p].busy += ticks;
        if (action.part != kInputGradient) in_flight[p] += action.part == kForward ? 1 : -1;
        counts[p].peak_in_flight = std::max(counts[p].peak_in_flight, in_flight[p]);
      }
      if (next[p] < std::ssize(schedule[p]))
        waiting += fmt::format(" place {} at {}", p, text_of(schedule[p][next[p]]));
    }
  }
  TORCH_CHECK_VALUE(waiting.empty(),
                    "[check_schedule] an action must come after those that it needs, and places "
                    "must not wait for each other; for ever wait:",
                    waiting);
  for (PipelineCounts& each : counts) each.ticks = *std::ranges::max_element(clock);
  return counts;
}

std::vector<int64_t> stages_at(const PipelineSchedule& schedule, int64_t place) {
  std::set<int64_t> stages;
  for (const PipelineAction& action : schedule.at(place)) stages.insert(action.stage);
  return {stages.begin(), stages.end()};
}

}  // namespace tessera
