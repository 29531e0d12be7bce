#include "outlast/elastic/stop_agreement.h"

#include <algorithm>

namespace outlast {

void StopAgreement::Include(int who) {
  const auto index = static_cast<size_t>(who);
  if (index >= states_.size()) states_.resize(index + 1, State::kOutside);
  if (states_[index] == State::kOutside) states_[index] = State::kAsked;
}

void StopAgreement::Excuse(int who) {
  if (includes(who)) states_[static_cast<size_t>(who)] = State::kExcused;
}

bool StopAgreement::includes(int who) const {
  const auto index = static_cast<size_t>(who);
  return index < states_.size() && states_[index] != State::kOutside;
}

int64_t StopAgreement::Ask(int64_t newest_step) {
  AskFor(newest_step + margin_);
  return step_;
}

void StopAgreement::AskFor(int64_t step) {
  step_ = step;
  std::replace(states_.begin(), states_.end(), State::kOnTime, State::kAsked);
}

bool StopAgreement::OnAnswer(int who, bool on_time, int64_t at, int64_t asked) {
  if (!includes(who) || went_ || gave_up_) return false;
  if (asked != 0 && asked != step_) return false;
  State& state = states_[static_cast<size_t>(who)];
  if (on_time) {
    if (state == State::kAsked) state = State::kOnTime;
    return false;
  }
  if (asked == 0 && at < step_) return false;
  margin_ *= 2;
  return true;
}

bool StopAgreement::everybody_is_on_time() const {
  return std::find(states_.begin(), states_.end(), State::kAsked) == states_.end();
}

bool StopAgreement::Go() {
  const bool anybody = std::find(states_.begin(), states_.end(), State::kOnTime) != states_.end();
  if (went_ || gave_up_ || !anybody || !everybody_is_on_time()) return false;
  went_ = true;
  return true;
}

}  // namespace outlast
