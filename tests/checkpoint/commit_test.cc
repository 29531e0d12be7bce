#include "checkpoint/commit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "outlast/base/status.h"
#include "tests/support/seed.h"

namespace outlast {
namespace {

using ::testing::HasSubstr;

constexpr char kFolder[] = "step-000000000120-0000000a";

template <typename Action>
const Action* Find(const std::vector<CommitAction>& actions) {
  for (const CommitAction& action : actions) {
    if (const auto* found = std::get_if<Action>(&action)) return found;
  }
  return nullptr;
}

// Ranks 0 and 1 on node a, 2 and 3 on node b; the folder was made at 1 s.
struct Saving {
  Commit commit{7, 120, {{"a", {0, 1}}, {"b", {2, 3}}}, CommitLimits{}};
  const SaveKey key{7, kFolder};
  std::vector<CommitAction> last;

  Saving() {
    EXPECT_NE(Find<MakeSaveFolder>(commit.Start(absl::Seconds(0))), nullptr);
    Step(FolderMade{kFolder}, 1);
    EXPECT_NE(Find<AnnounceSave>(last), nullptr);
  }
  void Step(const CommitEvent& event, int64_t second) {
    last = commit.Step(event, absl::Seconds(second));
  }
  void Write(uint32_t rank, int64_t second) {
    Step(RankWritten{rank < 2 ? "a" : "b", key, {rank, {"w", 1, 2, 3}}}, second);
  }
  void WriteAll() {
    for (uint32_t rank = 0; rank < 4; ++rank) Write(rank, 2);
  }
};

TEST(CommitMachine, CommitsWhenAllReceiptsAreInAndTheHooksSayOk) {
  Saving saving;
  for (uint32_t rank = 0; rank < 3; ++rank) saving.Write(rank, 2);
  EXPECT_EQ(saving.commit.phase(), CommitPhase::kWriting);
  saving.Write(3, 3);
  EXPECT_EQ(saving.commit.phase(), CommitPhase::kCollected);
  EXPECT_NE(Find<AskSaveHooks>(saving.last), nullptr);
  saving.Step(HooksAnswered{}, 4);
  EXPECT_EQ(saving.commit.phase(), CommitPhase::kChecked);
  EXPECT_NE(Find<LinkManifest>(saving.last), nullptr);
  saving.Step(ManifestLinked{}, 5);
  EXPECT_EQ(saving.commit.phase(), CommitPhase::kCommitted);
  ASSERT_NE(Find<TellOutcome>(saving.last), nullptr);
  EXPECT_TRUE(Find<TellOutcome>(saving.last)->outcome.ok());
  EXPECT_EQ(Find<RemoveSaveFolder>(saving.last), nullptr);
}

TEST(CommitMachine, NamesTheMissingWriter) {
  Saving saving;
  for (uint32_t rank = 0; rank < 3; ++rank) saving.Write(rank, 2);
  saving.Step(TimePassed{}, 31);
  EXPECT_EQ(saving.commit.phase(), CommitPhase::kWriting);
  EXPECT_EQ(saving.commit.deadline(), absl::Seconds(32)) << "30 s after its last receipt";
  saving.Step(TimePassed{}, 32);
  EXPECT_EQ(saving.commit.phase(), CommitPhase::kAborted);
  EXPECT_THAT(std::string(MessageOf(saving.commit.reason())),
              HasSubstr("save of step 120: rank 3 on node 'b': no progress, 3 of 4 parts"));
  EXPECT_NE(Find<RemoveSaveFolder>(saving.last), nullptr);
}

TEST(CommitMachine, ProgressPutsAStallOffButNotTheDeadlineOfAll) {
  Saving saving;
  saving.Write(0, 2);
  saving.Write(1, 2);
  for (int64_t second = 10; second < 101; second += 10)
    saving.Step(PartProgressed{"b", saving.key}, second);
  EXPECT_EQ(saving.commit.phase(), CommitPhase::kWriting);
  saving.Step(PartProgressed{"b", saving.key}, 101);  // 1 + 60 + 10 + 30
  EXPECT_EQ(saving.commit.phase(), CommitPhase::kAborted);
  EXPECT_THAT(std::string(MessageOf(saving.commit.reason())),
              HasSubstr("rank 2 on node 'b', rank 3 on node 'b': not written, 2 of 4"));
}

TEST(CommitMachine, AFailedWriterEndsTheSaveWithItsName) {
  Saving saving;
  saving.Step(PartFailed{"b", saving.key, 2, absl::ResourceExhaustedError("no space left")}, 2);
  EXPECT_EQ(saving.commit.phase(), CommitPhase::kAborted);
  EXPECT_TRUE(absl::IsResourceExhausted(saving.commit.reason()));
  EXPECT_THAT(std::string(MessageOf(saving.commit.reason())),
              HasSubstr("rank 2 on node 'b': no space left"));
}

TEST(CommitMachine, ANodeThatIsLostAfterItsReceiptsHoldsNothingUp) {
  Saving saving;
  saving.Write(2, 2);
  saving.Write(3, 2);
  saving.Step(PartLost{"b", "reset"}, 3);
  EXPECT_EQ(saving.commit.phase(), CommitPhase::kWriting);
  saving.Step(PartLost{"a", "reset"}, 3);
  EXPECT_EQ(saving.commit.phase(), CommitPhase::kAborted);
}

TEST(CommitMachine, IgnoresMessagesOfAnotherSaveAndOfOtherNodes) {
  Saving saving;
  saving.Step(RankWritten{"b", {6, kFolder}, {2, {}}}, 2);
  saving.Step(RankWritten{"b", {7, "step-000000000119-0000000a"}, {2, {}}}, 2);
  saving.Step(RankWritten{"b", saving.key, {0, {}}}, 2);
  saving.Step(RankWritten{"c", saving.key, {2, {}}}, 2);
  saving.Step(PartFailed{"b", {6, kFolder}, 2, absl::InternalError("old")}, 2);
  EXPECT_EQ(saving.commit.phase(), CommitPhase::kWriting);
  EXPECT_TRUE(saving.commit.written().empty());
  EXPECT_EQ(saving.commit.ignored(), 5u);
}

TEST(CommitMachine, AVetoAndAnEndOfTheGenerationAbort) {
  Saving vetoed;
  vetoed.WriteAll();
  vetoed.Step(HooksAnswered{absl::FailedPreconditionError("not finite")}, 3);
  EXPECT_TRUE(absl::IsFailedPrecondition(vetoed.commit.reason()));

  Saving ended;
  ended.Step(SaveGenerationEnded{6, "an older one"}, 2);
  EXPECT_EQ(ended.commit.phase(), CommitPhase::kWriting);
  ended.Step(SaveGenerationEnded{7, "rank 2 is lost"}, 2);
  EXPECT_TRUE(absl::IsAborted(ended.commit.reason()));
}

// What the disk says counts, once it was asked.
TEST(CommitMachine, ALinkThatComesAfterItsDeadlineCommits) {
  Saving saving;
  saving.WriteAll();
  saving.Step(HooksAnswered{}, 3);
  saving.Step(SaveGenerationEnded{7, "rank 2 is lost"}, 4);
  EXPECT_EQ(saving.commit.phase(), CommitPhase::kChecked);
  saving.Step(TimePassed{}, 33);
  EXPECT_EQ(saving.commit.phase(), CommitPhase::kAborted);
  EXPECT_EQ(Find<RemoveSaveFolder>(saving.last), nullptr) << "a manifest may come to stand there";
  saving.Step(ManifestLinked{}, 50);
  EXPECT_EQ(saving.commit.phase(), CommitPhase::kCommitted);
}

TEST(CommitMachine, NeverRemovesAFolderThatAnotherCommitterHasTaken) {
  Saving saving;
  saving.WriteAll();
  saving.Step(HooksAnswered{}, 3);
  saving.Step(ManifestLinked{absl::AbortedError("another manifest is there")}, 4);
  EXPECT_EQ(saving.commit.phase(), CommitPhase::kAborted);
  EXPECT_EQ(Find<RemoveSaveFolder>(saving.last), nullptr);
}

TEST(CommitMachine, RemovesAFolderThatCameTooLate) {
  Commit commit(7, 120, {{"a", {0}}}, {});
  commit.Start(absl::ZeroDuration());
  commit.Step(TimePassed{}, absl::Seconds(10));
  EXPECT_EQ(commit.phase(), CommitPhase::kAborted);
  const auto actions = commit.Step(FolderMade{kFolder}, absl::Seconds(20));
  EXPECT_NE(Find<RemoveSaveFolder>(actions), nullptr);
  EXPECT_EQ(Find<AnnounceSave>(actions), nullptr);
}

TEST(WriteFence, LetsNothingInOfAnAbortedGeneration) {
  WriteFence fence;
  const SaveKey save{7, kFolder};
  EXPECT_TRUE(fence.Begin(save));
  EXPECT_TRUE(fence.Enter(save));
  EXPECT_TRUE(fence.Abort(7, absl::ZeroDuration()));
  EXPECT_FALSE(fence.Enter(save));
  EXPECT_FALSE(fence.Begin({7, "step-000000000121-0000000b"}));
  EXPECT_TRUE(fence.Begin({8, "step-000000000121-0000000b"}));
}

TEST(WriteFence, RefusesAFormerCommitter) {
  WriteFence fence;
  EXPECT_TRUE(fence.Begin({8, "step-000000000121-0000000b"}));
  EXPECT_FALSE(fence.Begin({7, kFolder}));
  EXPECT_TRUE(fence.IsOpen({8, "step-000000000121-0000000b"}));
}

TEST(WriteFence, AnAbortWaitsForTheReceiptThatIsBeingWritten) {
  WriteFence fence;
  const SaveKey save{7, kFolder};
  fence.Begin(save);
  auto permit = std::make_unique<WriteFence::Permit>(fence.Enter(save));
  EXPECT_FALSE(fence.Abort(7, absl::Milliseconds(1))) << "a disk that hangs holds up nobody";
  std::thread writer([&] { permit.reset(); });
  EXPECT_TRUE(fence.Abort(7, absl::Seconds(60)));
  writer.join();
}

// --- Random schedules

// What lies on the disk that all nodes see.
struct Folder {
  uint64_t generation = 0, snapshot_generation = 0, claim = 0;
  int64_t step = 0;
  std::map<uint32_t, std::pair<uint64_t, int64_t>> receipts;  // rank -> snapshot
  int manifests = 0;
  bool removed = false;
};

// Nodes 0 .. n-1 with one rank each, the first living one is the committer. Messages and disk work
// take random times, any node may crash, be isolated with its committer's machine still going, or
// be replaced.
class CommitSim {
 public:
  explicit CommitSim(uint32_t seed) : random_(seed) {}

  void Play() {
    nodes_.resize(1 + Draw(4));
    for (auto& node : nodes_) node = std::make_unique<Node>();
    Form();
    for (int i = 0; i < 120; ++i) {
      Turn();
      Check();
    }
    // Quiet at last: what is under way ends, and whoever waits is told by a deadline.
    chaos_ = false;
    for (int i = 0; i < 4000 && !events_.empty(); ++i) Deliver();
    for (int i = 0; i < 400; ++i) {
      now_ += absl::Seconds(1);
      Tick();
      while (!events_.empty()) Deliver();
    }
    for (const auto& node : nodes_) {
      if (node->commit) {
        EXPECT_TRUE(node->commit->is_over()) << NameOf(node->commit->phase());
      }
    }
    Check();
  }

  int committed() const { return told_committed_; }

 private:
  struct Node {
    uint64_t generation = 0;  // it is in
    uint64_t life = 0;
    bool isolated = false;
    WriteFence fence;
    std::shared_ptr<Commit> commit;  // of a committer
    uint64_t claim = 0;
  };

  uint32_t Draw(uint32_t below) { return random_() % below; }
  void Later(std::function<void()> work) {
    // Connections keep their order no longer than they stand; disks do not at all: any order.
    events_.insert(events_.begin() + Draw(static_cast<uint32_t>(events_.size()) + 1),
                   std::move(work));
  }
  void Deliver() {
    auto work = std::move(events_.front());
    events_.pop_front();
    now_ += absl::Milliseconds(Draw(3000));
    work();
  }
  static std::string NodeName(size_t i) { return "n" + std::to_string(i); }

  // A generation of all that are not isolated; who was is in an older one, and knows nothing.
  void Form() {
    ++generation_;
    lead_ = nodes_.size();
    for (size_t i = 0; i < nodes_.size(); ++i) {
      Node& node = *nodes_[i];
      if (node.isolated) continue;
      node.fence.Abort(generation_ - 1, absl::ZeroDuration());
      aborts_[i] = {node.life, generation_ - 1};
      node.generation = generation_;
      if (node.commit) Step(i, node.commit, SaveGenerationEnded{generation_ - 1, "re-form"});
      if (lead_ == nodes_.size()) lead_ = i;
    }
    if (lead_ == nodes_.size()) return;
    Node& lead = *nodes_[lead_];
    if (lead.claim == 0 || lead.claim != newest_claim_) {
      lead.claim = ++newest_claim_;
      RollForward(lead);
    }
    // All go on from the newest that stands; a step of memory would do as well.
    step_ = std::max<int64_t>(Newest(), 0);
  }

  int64_t Newest() const {
    std::tuple<uint64_t, uint64_t, int64_t> newest{0, 0, -1};
    for (const auto& [name, folder] : disk_) {
      if (folder.manifests > 0 && !folder.removed)
        newest =
            std::max(newest, std::tuple(folder.claim, folder.snapshot_generation, folder.step));
    }
    return std::get<2>(newest);
  }

  void RollForward(Node& lead) {
    for (auto& [name, folder] : disk_) {
      if (folder.manifests > 0 || folder.removed || folder.receipts.size() != nodes_.size())
        continue;
      Link(folder, name);
    }
    (void)lead;
  }

  bool Link(Folder& folder, const std::string& name) {
    if (folder.manifests > 0 || folder.removed) return false;
    ++folder.manifests;
    EXPECT_EQ(folder.receipts.size(), nodes_.size()) << name << ": a manifest without receipts";
    return true;
  }

  void BeginSave() {
    if (lead_ == nodes_.size()) return;
    Node& lead = *nodes_[lead_];
    if (lead.commit && !lead.commit->is_over()) return;
    std::vector<CommitPart> parts;
    for (size_t i = 0; i < nodes_.size(); ++i) {
      if (nodes_[i]->generation != generation_ || nodes_[i]->isolated) return;  // not whole
      parts.push_back({NodeName(i), {static_cast<uint32_t>(i)}});
    }
    lead.commit = std::make_shared<Commit>(generation_, ++step_, parts, CommitLimits{});
    const auto commit = lead.commit;
    Do(lead_, commit, commit->Start(now_));
  }

  void Step(size_t who, const std::shared_ptr<Commit>& commit, const CommitEvent& event) {
    Do(who, commit, commit->Step(event, now_));
  }
  // A message.
  void Hear(size_t who, uint64_t life, const CommitEvent& event) {
    Node& node = *nodes_[who];
    if (node.life == life && node.commit) Step(who, node.commit, event);
  }
  // What the disk says to the machine that asked it.
  void Answer(size_t who, uint64_t life, const std::shared_ptr<Commit>& commit,
              const CommitEvent& event) {
    if (nodes_[who]->life == life) Step(who, commit, event);
  }

  void Do(size_t who, const std::shared_ptr<Commit> commit,
          const std::vector<CommitAction>& actions) {
    Node& node = *nodes_[who];
    const uint64_t life = node.life;
    for (const CommitAction& action : actions) {
      if (std::holds_alternative<MakeSaveFolder>(action)) {
        Folder folder{generation_, generation_, node.claim, step_, {}, 0, false};
        const std::string name = "f" + std::to_string(disk_.size());
        disk_[name] = folder;
        Later([=, this] { Answer(who, life, commit, FolderMade{name}); });
      } else if (const auto* announce = std::get_if<AnnounceSave>(&action)) {
        const Folder& folder = disk_[announce->save.checkpoint];
        for (size_t i = 0; i < nodes_.size(); ++i)
          Later(
              [=, this, save = announce->save, step = folder.step] { Write(i, who, save, step); });
      } else if (std::holds_alternative<AskSaveHooks>(action)) {
        const bool veto = chaos_ && Draw(12) == 0;
        Later([=, this] {
          Answer(who, life, commit,
                 HooksAnswered{veto ? absl::FailedPreconditionError("veto") : absl::OkStatus()});
        });
      } else if (std::holds_alternative<LinkManifest>(action)) {
        Later([=, this, save = commit->save(), claim = node.claim] {
          if (nodes_[who]->life != life) return;
          Folder& folder = disk_[save.checkpoint];
          absl::Status status;
          if (claim != newest_claim_) {
            status = absl::AbortedError("a newer claim");
          } else if (!Link(folder, save.checkpoint)) {
            status = absl::AbortedError("another manifest");
          }
          if (Draw(4) == 0) return;  // it is linked, and nobody hears of it
          Later([=, this] { Answer(who, life, commit, ManifestLinked{status}); });
        });
      } else if (const auto* told = std::get_if<TellOutcome>(&action)) {
        if (told->outcome.ok()) {
          ++told_committed_;
          EXPECT_EQ(disk_[told->save.checkpoint].manifests, 1);
          acknowledged_.insert(told->save.checkpoint);
        }
        for (const auto& one : nodes_) one->fence.End(told->save);
      } else if (std::holds_alternative<RemoveSaveFolder>(action)) {
        // A removal that the machine asked for never meets a manifest.
        Folder& folder = disk_[commit->save().checkpoint];
        if (node.claim != newest_claim_) continue;  // who lost the root cleans nothing up
        EXPECT_EQ(folder.manifests, 0) << "a committed checkpoint was removed";
        folder.removed = true;
      }
    }
  }

  void Write(size_t i, size_t committer, const SaveKey& save, int64_t step) {
    Node& node = *nodes_[i];
    const bool cut = node.isolated != nodes_[committer]->isolated;
    if (cut || !node.fence.Begin(save)) return;
    const uint64_t life = node.life;
    const uint64_t to = nodes_[committer]->life;
    if (chaos_ && Draw(15) == 0) {
      return Later([=, this] {
        Hear(committer, to,
             PartFailed{NodeName(i), save, static_cast<int>(i),
                        absl::ResourceExhaustedError("full")});
      });
    }
    Later([=, this] {
      Node& writer = *nodes_[i];
      if (writer.life != life) return;
      const WriteFence::Permit permit = writer.fence.Enter(save);
      if (!permit) return;
      if (aborts_.contains(i) && aborts_[i].first == life) {
        EXPECT_GT(save.generation, aborts_[i].second) << "a receipt after an acknowledged abort";
      }
      Folder& folder = disk_[save.checkpoint];
      if (folder.removed) return;
      folder.receipts[static_cast<uint32_t>(i)] = {save.generation, step};
      Later([=, this] {
        if (nodes_[i]->isolated != nodes_[committer]->isolated) return;
        Hear(committer, to, RankWritten{NodeName(i), save, {static_cast<uint32_t>(i), {}}});
      });
    });
  }

  void Crash(size_t i) {
    const bool was_isolated = nodes_[i]->isolated;
    const uint64_t life = nodes_[i]->life + 1;
    nodes_[i] = std::make_unique<Node>();
    nodes_[i]->life = life;
    for (size_t k = 0; k < nodes_.size(); ++k) {
      if (k == i || !nodes_[k]->commit) continue;
      Step(k, nodes_[k]->commit, PartLost{NodeName(i), "crash"});
    }
    if (!was_isolated || Draw(2) == 0) Form();
  }

  // Retention: of what is committed the newest two stay, by the chain's order.
  void Retain() {
    std::vector<std::pair<std::tuple<uint64_t, uint64_t, int64_t>, std::string>> standing;
    for (const auto& [name, folder] : disk_) {
      if (folder.manifests > 0 && !folder.removed)
        standing.emplace_back(std::tuple(folder.claim, folder.snapshot_generation, folder.step),
                              name);
    }
    std::ranges::sort(standing);
    for (size_t i = 0; i + 2 < standing.size(); ++i) {
      disk_[standing[i].second].removed = true;
      acknowledged_.erase(standing[i].second);
    }
  }

  void Tick() {
    for (size_t i = 0; i < nodes_.size(); ++i) {
      if (nodes_[i]->commit) Step(i, nodes_[i]->commit, TimePassed{});
    }
  }

  void Turn() {
    const uint32_t dice = Draw(100);
    if (dice < 60 && !events_.empty()) return Deliver();
    if (dice < 85) return BeginSave();
    if (dice < 88) return Crash(Draw(static_cast<uint32_t>(nodes_.size())));
    if (dice < 91) {
      Node& node = *nodes_[Draw(static_cast<uint32_t>(nodes_.size()))];
      node.isolated = !node.isolated;
      return Form();
    }
    if (dice < 94) return Retain();
    now_ += absl::Seconds(Draw(40));
    Tick();
  }

  void Check() {
    bool any = acknowledged_.empty();
    for (const auto& [name, folder] : disk_) {
      ASSERT_LE(folder.manifests, 1) << name << ": two manifests";
      if (folder.manifests == 0) continue;
      ASSERT_EQ(folder.receipts.size(), nodes_.size()) << name;
      for (const auto& [rank, snapshot] : folder.receipts)
        ASSERT_EQ(snapshot, folder.receipts.begin()->second) << name << ": mixed generations";
      any = any || !folder.removed;
    }
    for (const std::string& name : acknowledged_)
      ASSERT_FALSE(disk_[name].removed) << name << " was committed, and is gone";
    ASSERT_TRUE(any) << "nothing restores";
  }

  std::mt19937 random_;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::deque<std::function<void()>> events_;
  std::map<std::string, Folder> disk_;
  std::map<size_t, std::pair<uint64_t, uint64_t>> aborts_;  // node -> its life, generation
  std::set<std::string> acknowledged_;
  uint64_t generation_ = 0, newest_claim_ = 0;
  size_t lead_ = 0;
  int64_t step_ = 0;
  int told_committed_ = 0;
  bool chaos_ = true;
  absl::Duration now_;
};

TEST(CommitMachine, HoldsItsPromisesOverTenThousandRandomSchedules) {
#ifdef OUTLAST_SANITIZED
  constexpr uint32_t kSchedules = 500;
#else
  constexpr uint32_t kSchedules = 10'000;
#endif
  const uint32_t seed = testing::DrawSeed();
  int committed = 0;
  for (uint32_t i = 0; i < kSchedules; ++i) {
    SCOPED_TRACE("OUTLAST_SEED=" + std::to_string(seed + i));
    CommitSim sim(seed + i);
    sim.Play();
    committed += sim.committed();
    if (HasFailure()) break;
  }
  EXPECT_GT(committed, static_cast<int>(kSchedules)) << "the schedules commit too seldom";
}

}  // namespace
}  // namespace outlast
