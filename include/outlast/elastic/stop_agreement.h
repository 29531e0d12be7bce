// How those who train agree on the step at which all of them stop.
//
// One asks for a step a little ahead (Ask), each of the others answers that it can still make it or
// that it is late (OnAnswer); a late answer doubles the margin and asks all again; when everybody
// is on time, all go (Go), once. Used for the ranks of a node, and by the coordinator for its
// agents.
#pragma once

#include <cstdint>
#include <vector>

namespace outlast {

class StopAgreement {
 public:
  // `who` (from 0) is asked from now on, and waited for.
  void Include(int who);
  // Its work is done: nobody waits for its answer.
  void Excuse(int who);
  bool includes(int who) const;

  // Asks everybody for a step that lies the margin ahead of `newest_step`; former answers are void.
  int64_t Ask(int64_t newest_step);
  // Asks for a step that somebody else chose.
  void AskFor(int64_t step);
  // `asked`: the step that is answered, 0 for the newest; `at`: where a late one is. True when it
  // is late for the step that is asked now: ask again, from `at` on. Answers to former steps, and
  // those that come after Go or GiveUp, are dropped.
  bool OnAnswer(int who, bool on_time, int64_t at, int64_t asked);
  bool everybody_is_on_time() const;
  // True once: when somebody was asked, and everybody is on time.
  bool Go();
  void GiveUp() { gave_up_ = true; }

  int64_t step() const { return step_; }  // 0: nobody was asked
  bool went() const { return went_; }
  bool gave_up() const { return gave_up_; }

 private:
  enum class State : uint8_t { kOutside, kAsked, kOnTime, kExcused };
  std::vector<State> states_;
  int64_t step_ = 0;
  int64_t margin_ = 2;
  bool went_ = false;
  bool gave_up_ = false;
};

}  // namespace outlast
