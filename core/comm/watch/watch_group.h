#pragma once

#include <unistd.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "comm/group/collective_form.h"
#include "comm/watch/watch.h"
#include "comm/watch/watch_state.h"

namespace tessera {

// The watch as one process group sees it.
class Watch::Group : public CollectiveWatch {
 public:
  Group(std::shared_ptr<Watch> watch, std::shared_ptr<GroupState> state)
      : watch_(std::move(watch)), state_(std::move(state)) {}

  std::shared_ptr<CollectiveWatch> part(const std::string& name, const std::vector<int>& ranks,
                                        bool is_inner) override {
    std::vector<int> of_world;
    for (const int rank : ranks) of_world.push_back(state_->ranks.at(rank));
    return watch_->group(state_->label + "/" + name, of_world, is_inner || state_->is_inner);
  }

  int world_rank(int rank) const override { return state_->ranks.at(rank); }
  Progress& progress() override { return watch_->progress_; }

  std::string place() const override {
    const auto [phase, step, since] = watch_->progress_.state();
    return phase == Phase::kUserCode && step == 1 ? "" : "in " + place_text(phase, step);
  }

  int64_t issued(const CollectiveName& name, const CollectiveForm& form) override {
    const auto [phase, step, since] = watch_->progress_.state();
    FlightEntry entry;
    entry.name = name.collective;
    entry.subject = name.subject;
    entry.channel = name.channel;
    entry.bytes = form.nbytes();
    entry.number = name.sequence;
    entry.fingerprint = form.fingerprint();
    entry.text = form.text();
    entry.phase = phase;
    entry.step = step;
    if (!state_->is_inner) {
      const std::lock_guard lock(watch_->mutex_);
      watch_->issuers_.insert(::gettid());
      watch_->last_issued_ = Clock::now();
    }
    const int64_t record = state_->record.add(std::move(entry));
    state_->issued.at(static_cast<size_t>(name.channel)).store(name.sequence + 1);
    return record;
  }

  void completed(int64_t record) override { state_->record.complete(record); }

  std::shared_ptr<void> begin_wait(const CollectiveName& name, Abort abort) override {
    const auto wait = std::make_shared<Wait>();
    wait->id = {state_->label, static_cast<int>(name.channel), name.sequence};
    wait->group = state_;
    wait->name = name;
    wait->name.watch = nullptr;
    wait->since = Clock::now();
    wait->next_report = wait->since + watch_->options_.report_after;
    wait->thread = ::gettid();
    wait->abort = std::move(abort);
    {
      const std::lock_guard lock(watch_->mutex_);
      watch_->waits_.push_back(wait);
      if (!state_->is_inner) watch_->issuers_.insert(wait->thread);
    }
    return {wait.get(), [watch = watch_, wait](void*) {
              {
                const std::lock_guard lock(watch->mutex_);
                std::erase(watch->waits_, wait);
              }
              const std::lock_guard calling(wait->calling);  // until a call in progress has ended
              wait->abort = nullptr;
            }};
  }

  void leave(const std::string& why) noexcept override { watch_->leave(why); }
  bool has_failed() const override { return watch_->has_failed(); }
  WaitCause cause_of(const CollectiveName& name, int peer, bool timed_out, bool has_ended) override;
  void failed(const CollectiveName& name, const WaitCause& cause,
              const std::string& error) override;

 private:
  const std::shared_ptr<Watch> watch_;
  const std::shared_ptr<GroupState> state_;
};

}  // namespace tessera
