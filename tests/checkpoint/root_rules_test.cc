// The pure decisions of root.h.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "checkpoint/root.h"
#include "outlast/base/status.h"

namespace outlast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

const Id128 kMine = Id128::FromName("mine");
const Id128 kOther = Id128::FromName("other");

ClaimView View(uint64_t number = 1) {
  ClaimView view;
  view.number = number;
  view.claim.run = kOther;
  view.claim.host = "node7";
  view.claim.pid = 42;
  view.first_beat = view.beat = 10;
  return view;
}

TEST(JudgeClaim, TakesWhatNobodyHolds) {
  EXPECT_EQ(JudgeClaim({}, kMine, TakeOver::kNo).verdict, ClaimVerdict::kTake);
  ClaimView released = View();
  released.released = true;
  EXPECT_EQ(JudgeClaim(released, kMine, TakeOver::kNo).verdict, ClaimVerdict::kTake);
  ClaimView gone = View();
  gone.owner = OwnerState::kGone;
  EXPECT_EQ(JudgeClaim(gone, kMine, TakeOver::kNo).verdict, ClaimVerdict::kTake);
  ClaimView own = View();
  own.claim.run = kMine;
  EXPECT_EQ(JudgeClaim(own, kMine, TakeOver::kNo).verdict, ClaimVerdict::kTake);
}

TEST(JudgeClaim, WatchesTheBeatForTwoBeatsAndThenTakes) {
  ClaimView view = View();
  for (const OwnerState owner : {OwnerState::kUnknown, OwnerState::kAlive}) {
    view.owner = owner;
    view.watched = absl::Seconds(9.9);
    EXPECT_EQ(JudgeClaim(view, kMine, TakeOver::kNo).verdict, ClaimVerdict::kWatch);
    view.watched = absl::Seconds(10);
    EXPECT_EQ(JudgeClaim(view, kMine, TakeOver::kNo).verdict, ClaimVerdict::kTake);
  }
}

TEST(JudgeClaim, RefusesALivingOwnerAndNamesIt) {
  ClaimView view = View(3);
  view.beat = 11;
  view.watched = absl::Seconds(12);
  const ClaimDecision decision = JudgeClaim(view, kMine, TakeOver::kNo);
  EXPECT_EQ(decision.verdict, ClaimVerdict::kRefuse);
  EXPECT_THAT(decision.reason, HasSubstr("claim 3"));
  EXPECT_THAT(decision.reason, HasSubstr("'node7'"));
  EXPECT_EQ(JudgeClaim(view, kMine, TakeOver::kYes).verdict, ClaimVerdict::kTake);
}

CheckpointInfo Info(int64_t step, uint64_t claim, uint64_t generation,
                    std::optional<int64_t> parent = std::nullopt,
                    std::vector<int64_t> ancestors = {}) {
  const auto name = [](int64_t s) { return CheckpointName(s, static_cast<uint32_t>(s + 1)); };
  CheckpointInfo info;
  info.name = name(step);
  info.step = step;
  info.state = CheckpointState::kCommitted;
  info.manifest.emplace();
  info.manifest->checkpoint = info.name;
  info.manifest->step = step;
  info.manifest->claim = claim;
  info.manifest->generation = generation;
  if (parent.has_value()) info.manifest->parent = name(*parent);
  for (const int64_t ancestor : ancestors) info.manifest->ancestors.push_back(name(ancestor));
  return info;
}

std::vector<int64_t> Steps(std::span<const CheckpointInfo> infos,
                           const std::vector<size_t>& indices) {
  std::vector<int64_t> steps;
  for (const size_t i : indices) steps.push_back(infos[i].step);
  return steps;
}

TEST(ResolveChain, FollowsParentsFromTheNewestOfTheNewestClaim) {
  // Claim 1 went to step 300; claim 2 went back to 100 and on to 250: 200 and 300 are abandoned
  // though their steps are larger.
  const std::vector<CheckpointInfo> infos = {Info(300, 1, 5, 200), Info(100, 1, 1),
                                             Info(200, 1, 3, 100), Info(150, 2, 1, 100),
                                             Info(250, 2, 1, 150)};
  const Chain chain = ResolveChain(infos);
  EXPECT_THAT(Steps(infos, chain.members), ElementsAre(250, 150, 100));
  EXPECT_THAT(Steps(infos, chain.abandoned), ElementsAre(300, 200));
}

TEST(ResolveChain, TakesTheLargestGenerationBeforeTheLargestStep) {
  const std::vector<CheckpointInfo> infos = {Info(900, 1, 1, 100), Info(100, 1, 1),
                                             Info(500, 1, 2, 100)};
  EXPECT_THAT(Steps(infos, ResolveChain(infos).members), ElementsAre(500, 100));
}

TEST(ResolveChain, StepsOverParentsThatAreGone) {
  std::vector<CheckpointInfo> infos = {Info(100, 1, 1), Info(400, 1, 1, 300, {300, 200, 100})};
  EXPECT_THAT(Steps(infos, ResolveChain(infos).members), ElementsAre(400, 100));
  infos[1].manifest->ancestors.clear();
  EXPECT_THAT(Steps(infos, ResolveChain(infos).members), ElementsAre(400));
}

TEST(ResolveChain, EndsInACircleThatNoWriterMakes) {
  const std::vector<CheckpointInfo> infos = {Info(1, 1, 1, 2), Info(2, 1, 1, 1)};
  EXPECT_THAT(Steps(infos, ResolveChain(infos).members), ElementsAre(2, 1));
  EXPECT_THAT(ResolveChain({}).members, IsEmpty());
}

// Case O15, the part that needs no disk: numbers, not text and not time, say what is old.
TEST(Retention, KeepsTheNewestThreeByTheChain) {
  std::vector<CheckpointInfo> infos;
  for (const int64_t step : {9, 10, 400, 900, 1000, 1100}) {
    infos.push_back(
        Info(step, 1, 1, infos.empty() ? std::nullopt : std::optional(infos.back().step)));
  }
  std::ranges::reverse(infos);
  EXPECT_THAT(ChooseDeletions(infos, {.keep_last = 3}, {}),
              ElementsAre(infos[3].name, infos[4].name, infos[5].name));  // 400, 10, 9
  EXPECT_THAT(ChooseDeletions(infos, {.keep_last = 1, .keep_every = 100}, {}),
              ElementsAre(infos[4].name, infos[5].name));
  EXPECT_THAT(ChooseDeletions(infos, {.keep_last = 0}, {}).size(),
              5u);  // the newest one always stays
}

TEST(Retention, SparesPinsAbandonedAndDamagedOnesAndDoesNotCountThem) {
  std::vector<CheckpointInfo> infos = {Info(100, 2, 1), Info(200, 2, 1, 100), Info(300, 2, 1, 200),
                                       Info(400, 2, 1, 300), Info(250, 1, 9)};
  infos[0].pinned = true;
  infos[3].state = CheckpointState::kDamaged;
  infos[2].quarantined = "bad chunk";
  // 400 is damaged and 300 in quarantine: 200 is the newest usable one.
  EXPECT_THAT(ChooseDeletions(infos, {.keep_last = 1}, {}), IsEmpty());
  infos[3].state = CheckpointState::kCommitted;
  EXPECT_THAT(ChooseDeletions(infos, {.keep_last = 1}, {}), ElementsAre(infos[1].name));
}

// The steps go down in the chain's middle (a run that went back), and the newer step 500 is no
// reason to keep it longer.
TEST(Retention, OrdersAlongTheChain) {
  const std::vector<CheckpointInfo> infos = {Info(500, 1, 1), Info(300, 2, 1, 500),
                                             Info(400, 2, 1, 300)};
  EXPECT_THAT(ChooseDeletions(infos, {.keep_last = 2}, {}), ElementsAre(infos[0].name));
}

TEST(Retention, NeitherCountsNorDeletesAbandonedOnes) {
  const std::vector<CheckpointInfo> infos = {Info(100, 1, 1), Info(900, 1, 1, 100), Info(150, 2, 1),
                                             Info(200, 2, 1, 150)};
  EXPECT_THAT(ChooseDeletions(infos, {.keep_last = 2}, {}), IsEmpty());
  EXPECT_THAT(ChooseDeletions(infos, {.keep_last = 1}, {}), ElementsAre(infos[2].name));
}

TEST(Retention, NeverTakesAForeignOne) {
  std::vector<CheckpointInfo> infos = {Info(100, 1, 1), Info(200, 1, 1, 100)};
  infos[0].state = CheckpointState::kForeign;
  EXPECT_THAT(ChooseDeletions(infos, {.keep_last = 1}, {}), IsEmpty());
}

TEST(Retention, TakesLeftoversButNotOfARunningSave) {
  std::vector<CheckpointInfo> infos = {Info(100, 1, 1), Info(200, 1, 1), Info(300, 1, 1)};
  infos[1].manifest.reset();
  infos[1].state = CheckpointState::kIncomplete;
  infos[2].manifest.reset();
  infos[2].state = CheckpointState::kDeleted;
  EXPECT_THAT(ChooseDeletions(infos, {}, {}), UnorderedElementsAre(infos[1].name, infos[2].name));
  const std::vector<std::string> running = {infos[1].name};
  EXPECT_THAT(ChooseDeletions(infos, {}, running), ElementsAre(infos[2].name));
}

std::vector<std::string> NamesOf(const std::vector<Garbage>& garbage) {
  std::vector<std::string> names;
  for (const Garbage& one : garbage) names.push_back(one.name);
  return names;
}

TEST(ChooseGarbage, TakesAbandonedAndUnfinishedOnesButNoPinAndNothingForeign) {
  // 100 and 200 are claim 1's; claim 2 began anew at 150.
  std::vector<CheckpointInfo> infos = {Info(100, 1, 1), Info(200, 1, 1, 100), Info(150, 2, 1),
                                       Info(300, 2, 1), Info(400, 2, 1),      Info(500, 3, 1)};
  infos[3].manifest.reset();
  infos[3].state = CheckpointState::kIncomplete;
  infos[4].manifest.reset();
  infos[4].state = CheckpointState::kDeleted;
  infos[5].state = CheckpointState::kForeign;
  EXPECT_THAT(NamesOf(ChooseGarbage(infos, RootOwner::kNone)),
              UnorderedElementsAre(infos[0].name, infos[1].name, infos[3].name, infos[4].name));
  EXPECT_THAT(NamesOf(ChooseGarbage(infos, RootOwner::kLiving)),
              UnorderedElementsAre(infos[0].name, infos[1].name));
  for (CheckpointInfo& info : infos) info.pinned = true;
  EXPECT_THAT(ChooseGarbage(infos, RootOwner::kNone), IsEmpty());
}

// The newest run's only checkpoint is damaged: what it left behind is all there is.
TEST(ChooseGarbage, KeepsAbandonedOnesWhileTheChainHasNoneThatIsWhole) {
  std::vector<CheckpointInfo> infos = {Info(100, 1, 1), Info(50, 2, 1)};
  infos[1].state = CheckpointState::kDamaged;
  EXPECT_THAT(ChooseGarbage(infos, RootOwner::kNone), IsEmpty());
  infos[1].state = CheckpointState::kCommitted;
  infos[1].quarantined = "a bad chunk";
  EXPECT_THAT(ChooseGarbage(infos, RootOwner::kNone), IsEmpty());
  infos[1].quarantined.clear();
  EXPECT_THAT(NamesOf(ChooseGarbage(infos, RootOwner::kNone)), ElementsAre(infos[0].name));
}

TEST(DecideStart, NeverBeginsAtStepZeroInSilence) {
  Listing listing;
  EXPECT_THAT(DecideStart(listing, StartMode::kResume)->candidates, IsEmpty());
  listing.checkpoints = {Info(100, 1, 1)};
  EXPECT_THAT(DecideStart(listing, StartMode::kResume)->candidates,
              ElementsAre(listing.checkpoints[0].name));
  listing.checkpoints[0].state = CheckpointState::kDamaged;
  listing.checkpoints[0].reason = "torn";
  const absl::Status status = DecideStart(listing, StartMode::kResume).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(MessageOf(status)), HasSubstr("torn"));
  EXPECT_THAT(DecideStart(listing, StartMode::kFresh)->candidates, IsEmpty());
}

RollForwardView Whole() {
  RollForwardView view;
  view.name = "step-000000000007-00000001";
  for (uint32_t rank = 0; rank < 2; ++rank) {
    Receipt receipt;
    receipt.run = kOther;
    receipt.claim = 4;
    receipt.checkpoint = view.name;
    receipt.step = 7;
    receipt.world = 2;
    receipt.rank = receipt.writer = rank;
    receipt.plan = "p";
    view.receipts.push_back(receipt);
  }
  ClaimFile mine{5, Claim{}, false};
  mine.claim->run = kMine;
  view.claims = {{4, Claim{}, false}, mine};
  return view;
}

TEST(RollForward, CommitsWhatIsWholeUnderTheRollersOwnNewerClaim) {
  EXPECT_TRUE(JudgeRollForward(Whole(), kMine).commit);
}

TEST(RollForward, NeedsEqualPlansRunsAndGenerations) {
  const auto reason = [](auto change) {
    RollForwardView view = Whole();
    change(view);
    const RollForwardDecision decision = JudgeRollForward(view, kMine);
    EXPECT_FALSE(decision.commit);
    return decision.reason;
  };
  EXPECT_THAT(reason([](auto& view) { view.receipts[1]->plan = "q"; }), HasSubstr("two saves"));
  EXPECT_THAT(reason([](auto& view) { view.receipts[1]->generation = 9; }), HasSubstr("two saves"));
  EXPECT_THAT(reason([](auto& view) { view.receipts[1]->run = kMine; }), HasSubstr("two saves"));
  EXPECT_THAT(reason([](auto& view) { view.receipts.pop_back(); }),
              HasSubstr("no receipt of rank 1"));
  EXPECT_THAT(reason([](auto& view) { view.receipts.clear(); }), HasSubstr("no receipts"));
  EXPECT_THAT(reason([](auto& view) { view.receipts[0] = absl::DataLossError("torn"); }),
              HasSubstr("torn"));
  EXPECT_THAT(reason([](auto& view) { view.deleted = true; }), HasSubstr("DELETED"));
  EXPECT_THAT(reason([](auto& view) { view.claims[1].claim->run = kOther; }), HasSubstr("newer"));
  EXPECT_THAT(reason([](auto& view) { view.claims[1].claim.reset(); }),
              HasSubstr("cannot be read"));
  EXPECT_THAT(reason([](auto& view) { view.name = "step-000000000007-00000002"; }),
              HasSubstr("receipts are of"));
}

TEST(RollForward, NeedsEachHookToHaveSaidOk) {
  RollForwardView view = Whole();
  for (auto& receipt : view.receipts) receipt->hooks = {"gate"};
  EXPECT_FALSE(JudgeRollForward(view, kMine).commit);
  view.hooks = HooksRecord{view.name, {{"gate", "veto", ""}}};
  EXPECT_FALSE(JudgeRollForward(view, kMine).commit);
  view.hooks->hooks[0].result = "ok";
  EXPECT_TRUE(JudgeRollForward(view, kMine).commit);
}

}  // namespace
}  // namespace outlast
