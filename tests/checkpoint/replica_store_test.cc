// The copies that an agent keeps, and their way from one agent to another over loopback.
#include "checkpoint/replica_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/replica_link.h"
#include "outlast/base/clock.h"
#include "outlast/base/crc32c.h"
#include "outlast/base/status.h"
#include "outlast/testing/time_factor.h"

namespace outlast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::TimeFactor;
using ::testing::UnorderedElementsAre;

constexpr uint64_t kImage = (2 << 20) + 5, kReplicated = 1000;  // three chunks and one
constexpr size_t kCopyBytes = (2 << 20) + 4096 + 4096;
const Id128 kRun = Id128::FromName("run");

std::vector<std::string> ChunksOf(uint32_t rank, int64_t step) {
  std::vector<std::string> chunks;
  const BufferLayout layout{.image_bytes = kImage, .replicated_bytes = kReplicated};
  for (uint32_t i = 0; i < layout.chunk_count(); ++i)
    chunks.emplace_back(layout.chunk(i).bytes, static_cast<char>(rank + 7 * step + i));
  return chunks;
}

ReplicaHead HeadOf(uint32_t rank, SnapshotKey key, std::optional<SnapshotKey> keep = {}) {
  ReplicaHead head;
  head.run_id = kRun;
  head.name = {rank, key};
  head.world = 4;
  head.image_bytes = kImage;
  head.replicated_bytes = kReplicated;
  for (const std::string& chunk : ChunksOf(rank, key.step)) head.crcs.push_back(Crc32c(chunk));
  head.extra = "extras of " + std::to_string(rank);
  head.keep = keep;
  return head;
}

std::span<const std::byte> BytesOf(const std::string& text) {
  return std::as_bytes(std::span(text));
}

absl::Status Add(ReplicaStore& store, uint32_t rank, SnapshotKey key,
                 std::optional<SnapshotKey> keep = {}) {
  auto copy = store.Begin(HeadOf(rank, key, keep), ReplicaUse::kRound);
  if (!copy.ok()) return copy.status();
  uint32_t index = 0;
  for (const std::string& chunk : ChunksOf(rank, key.step)) {
    if (const absl::Status put = (*copy)->Put(index++, BytesOf(chunk)); !put.ok()) return put;
  }
  return store.Commit(*copy);
}

std::unique_ptr<ReplicaStore> MakeStore(uint64_t most = 1 << 30) {
  auto store = std::make_unique<ReplicaStore>(most);
  store->Serve(kRun, 4);
  return store;
}

// --- One store

TEST(ReplicaHead, ComesBackAsItWas) {
  const ReplicaHead head = HeadOf(3, {2, 40}, SnapshotKey{1, 30});
  const auto again = DecodeReplicaHead(Encode(head));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->name, head.name);
  EXPECT_EQ(again->crcs, head.crcs);
  EXPECT_EQ(again->extra, head.extra);
  EXPECT_EQ(again->keep, head.keep);
}

TEST(ReplicaHead, CutOrOfSizesThatDoNotAddUpIsRefused) {
  const std::string bytes = Encode(HeadOf(3, {2, 40}));
  for (size_t size = 0; size < bytes.size(); ++size)
    EXPECT_FALSE(DecodeReplicaHead(bytes.substr(0, size)).ok()) << size;
  ReplicaHead head = HeadOf(3, {2, 40});
  head.crcs.pop_back();
  EXPECT_EQ(DecodeReplicaHead(Encode(head)).status().code(), absl::StatusCode::kInvalidArgument);
  head = HeadOf(4, {2, 40});  // of a world of 4
  EXPECT_FALSE(DecodeReplicaHead(Encode(head)).ok());
}

TEST(ReplicaStore, HoldsACopyOnceAllItsChunksCame) {
  const auto store = MakeStore();
  auto copy = store->Begin(HeadOf(1, {1, 10}), ReplicaUse::kRound);
  ASSERT_TRUE(copy.ok()) << copy.status();
  EXPECT_EQ(store->Find({1, {1, 10}}), nullptr);
  EXPECT_EQ(store->Commit(*copy).code(), absl::StatusCode::kAborted) << "torn";
  copy = absl::AbortedError("dropped");

  ASSERT_TRUE(Add(*store, 1, {1, 10}).ok());

  const auto found = store->Find({1, {1, 10}});
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(std::memcmp(found->chunk(3).data(), ChunksOf(1, 10)[3].data(), kReplicated), 0);
  EXPECT_EQ(found->head().extra, "extras of 1");
  EXPECT_EQ(store->bytes(), kCopyBytes);
}

TEST(ReplicaStore, AChunkThatDoesNotMatchIsRefusedAndNamed) {
  const auto store = MakeStore();
  const auto copy = store->Begin(HeadOf(1, {1, 10}), ReplicaUse::kRound).value();
  std::vector<std::string> chunks = ChunksOf(1, 10);
  EXPECT_EQ(copy->Put(1, BytesOf(chunks[1])).code(), absl::StatusCode::kInvalidArgument)
      << "out of turn";
  ASSERT_TRUE(copy->Put(0, BytesOf(chunks[0])).ok());
  chunks[1][77] ^= 4;

  const absl::Status put = copy->Put(1, BytesOf(chunks[1]));

  EXPECT_EQ(put.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(MessageOf(put)),
              HasSubstr("copy of rank 1, step 10 of generation 1: chunk 1 has crc "));
}

TEST(ReplicaStore, ATornCopyNeverCostsTheLastWholeOne) {
  const auto store = MakeStore();
  ASSERT_TRUE(Add(*store, 1, {1, 10}).ok());
  ASSERT_TRUE(Add(*store, 1, {1, 20}, SnapshotKey{1, 10}).ok());

  // Step 20 was whole here and not everywhere, so 10 must stay.
  auto torn = store->Begin(HeadOf(1, {1, 30}, SnapshotKey{1, 10}), ReplicaUse::kRound).value();
  torn.reset();
  EXPECT_THAT(store->Names(), ElementsAre(ReplicaName{1, {1, 10}}));

  ASSERT_TRUE(Add(*store, 1, {1, 40}, SnapshotKey{1, 10}).ok());
  ASSERT_TRUE(Add(*store, 1, {1, 50}, SnapshotKey{1, 40}).ok());
  EXPECT_THAT(store->Names(),
              UnorderedElementsAre(ReplicaName{1, {1, 40}}, ReplicaName{1, {1, 50}}));
}

TEST(ReplicaStore, AStaleOneOneOfAnotherRunAndOneOfAnotherWorldAreRefused) {
  const auto store = MakeStore();
  ASSERT_TRUE(Add(*store, 1, {2, 10}).ok());
  const auto refused = [&](const ReplicaHead& head) {
    const auto begun = store->Begin(head, ReplicaUse::kRound);
    EXPECT_EQ(begun.status().code(), absl::StatusCode::kFailedPrecondition);
    return std::string(MessageOf(begun.status()));
  };

  EXPECT_THAT(refused(HeadOf(1, {2, 9})), HasSubstr("stale, step 10 of generation 2 is here"));
  EXPECT_THAT(refused(HeadOf(1, {1, 11})), HasSubstr("stale"));
  ReplicaHead head = HeadOf(1, {2, 11});
  head.run_id = Id128::FromName("other");
  EXPECT_THAT(refused(head), HasSubstr("of run " + head.run_id.hex()));
  head = HeadOf(1, {2, 11});
  head.world = 8;
  EXPECT_THAT(refused(head), HasSubstr("world 8"));
  EXPECT_TRUE(store->Begin(HeadOf(1, {1, 9}), ReplicaUse::kRestore).ok()) << "asked for";
}

TEST(ReplicaStore, MoreThanItsShareIsRefusedAndCountedAndWhatIsThereStays) {
  const auto store = MakeStore(2 * kCopyBytes + 100);
  ASSERT_TRUE(Add(*store, 1, {1, 10}).ok());
  ASSERT_TRUE(Add(*store, 2, {1, 10}).ok());

  const absl::Status third = Add(*store, 3, {1, 10});

  EXPECT_EQ(third.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(MessageOf(third)), HasSubstr("--peer-memory"));
  EXPECT_EQ(store->refused(), 1u);
  EXPECT_EQ(store->Names().size(), 2u);
}

TEST(ReplicaStore, ARollbackDropsWhatIsNewerAndAnotherWorldAll) {
  const auto store = MakeStore();
  ASSERT_TRUE(Add(*store, 1, {1, 10}).ok());
  ASSERT_TRUE(Add(*store, 1, {1, 20}).ok());
  store->DropNewerThan(15);
  EXPECT_THAT(store->Names(), ElementsAre(ReplicaName{1, {1, 10}}));
  store->Serve(kRun, 2);
  EXPECT_THAT(store->Names(), IsEmpty());
}

TEST(ReplicaStore, WhoFillsAPlaceThatWasTakenFromHimCommitsNothing) {
  const auto store = MakeStore();
  const auto late = store->Begin(HeadOf(1, {1, 10}), ReplicaUse::kRound).value();
  store->DropNewerThan(0);
  uint32_t index = 0;
  for (const std::string& chunk : ChunksOf(1, 10)) {
    ASSERT_TRUE(late->Put(index++, BytesOf(chunk)).ok());
  }
  EXPECT_EQ(store->Commit(late).code(), absl::StatusCode::kAborted);
}

// --- Two agents

struct Agent {
  explicit Agent(std::string name, uint64_t rate = 0, std::string token = "token",
                 uint64_t most = 1 << 30)
      : node(std::move(name)), store(MakeStore(most)) {
    link = ReplicaLink::Start({.job = "job",
                               .node = node,
                               .host = "127.0.0.1",
                               .token = std::move(token),
                               .bytes_per_second = rate},
                              *store)
               .value();
    link->Enter(kRun, 1, {"a", "b"});
  }
  std::string node;
  std::unique_ptr<ReplicaStore> store;
  std::unique_ptr<ReplicaLink> link;
};

struct Ended {
  absl::Status outcome;
  uint64_t bytes = 0;
};
// What `begin` ends with, which is given a Done.
template <typename BeginIt>
Ended Wait(BeginIt begin) {
  std::promise<Ended> ended;
  begin([&](const absl::Status& outcome, uint64_t bytes) {
    ended.set_value({MakeStatus(outcome.code(), MessageOf(outcome)), bytes});
  });
  return ended.get_future().get();
}

Ended Push(Agent& from, Agent& to, std::vector<ReplicaName> names) {
  return Wait([&](ReplicaLink::Done done) {
    from.link->Push(to.node, to.link->address(), std::move(names), std::nullopt, std::move(done));
  });
}
Ended Fetch(Agent& to, Agent& from, std::vector<ReplicaName> names) {
  return Wait([&](ReplicaLink::Done done) {
    to.link->Fetch(from.node, from.link->address(), std::move(names), std::move(done));
  });
}

void ExpectSame(const std::shared_ptr<const Replica>& copy, uint32_t rank, int64_t step) {
  ASSERT_NE(copy, nullptr);
  const std::vector<std::string> chunks = ChunksOf(rank, step);
  for (uint32_t i = 0; i < copy->chunk_count(); ++i)
    EXPECT_EQ(std::memcmp(copy->chunk(i).data(), chunks[i].data(), chunks[i].size()), 0) << i;
}

TEST(ReplicaLink, BringsCopiesToThePartnerAndBack) {
  Agent a("a"), b("b");
  ASSERT_TRUE(Add(*a.store, 0, {1, 10}).ok());
  ASSERT_TRUE(Add(*a.store, 1, {1, 10}).ok());

  const Ended pushed = Push(a, b, {{0, {1, 10}}, {1, {1, 10}}});

  EXPECT_TRUE(pushed.outcome.ok()) << pushed.outcome;
  EXPECT_EQ(pushed.bytes, 2 * (kImage + kReplicated));
  ExpectSame(b.store->Find({0, {1, 10}}), 0, 10);
  ExpectSame(b.store->Find({1, {1, 10}}), 1, 10);

  a.store->Serve(kRun, 5);
  a.store->Serve(kRun, 4);
  ASSERT_THAT(a.store->Names(), IsEmpty());
  const Ended fetched = Fetch(a, b, {{1, {1, 10}}});
  EXPECT_TRUE(fetched.outcome.ok()) << fetched.outcome;
  ExpectSame(a.store->Find({1, {1, 10}}), 1, 10);
}

TEST(ReplicaLink, AFlippedBitIsFoundOnArrivalAndNothingIsKept) {
  Agent a("a"), b("b");
  ASSERT_TRUE(Add(*b.store, 1, {1, 10}).ok());
  b.store->Find({1, {1, 10}})->chunk(2)[3] ^= std::byte{1};

  const Ended fetched = Fetch(a, b, {{1, {1, 10}}});

  EXPECT_EQ(fetched.outcome.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(MessageOf(fetched.outcome)), HasSubstr("chunk 2 has crc"));
  EXPECT_THAT(a.store->Names(), IsEmpty());
}

TEST(ReplicaLink, WhatIsNotThereIsNotFound) {
  Agent a("a"), b("b");
  EXPECT_EQ(Fetch(a, b, {{1, {1, 10}}}).outcome.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Push(a, b, {{1, {1, 10}}}).outcome.code(), absl::StatusCode::kNotFound);
}

// Case D13: what is asked for before it is whole is refused at once and not waited for, since an
// agent is sent only to who has said that it holds the copy.
TEST(ReplicaLink, ServesAStepOnceItIsWholeAndNoOtherAndKeepsItsBytesMeanwhile) {
  Agent a("a"), b("b");
  const auto filling = b.store->Begin(HeadOf(1, {1, 7}), ReplicaUse::kRound).value();
  EXPECT_EQ(Fetch(a, b, {{1, {1, 7}}}).outcome.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(a.store->Names(), IsEmpty());
  uint32_t index = 0;
  for (const std::string& chunk : ChunksOf(1, 7)) {
    ASSERT_TRUE(filling->Put(index++, BytesOf(chunk)).ok());
  }
  ASSERT_TRUE(b.store->Commit(filling).ok());

  EXPECT_TRUE(Fetch(a, b, {{1, {1, 7}}}).outcome.ok());
  ExpectSame(a.store->Find({1, {1, 7}}), 1, 7);
  EXPECT_EQ(Fetch(a, b, {{1, {1, 8}}}).outcome.code(), absl::StatusCode::kNotFound);

  // Who serves it holds it: rounds that take its place write elsewhere, and it takes no more.
  const auto served = b.store->Find({1, {1, 7}});
  for (const int64_t step : {8, 9, 10}) ASSERT_TRUE(Add(*b.store, 1, {1, step}).ok());
  ASSERT_EQ(b.store->Find({1, {1, 7}}), nullptr);
  ExpectSame(served, 1, 7);
  EXPECT_EQ(filling->Put(0, BytesOf(ChunksOf(1, 8)[0])).code(), absl::StatusCode::kInvalidArgument);
}

TEST(ReplicaLink, APartnerWithoutRoomSaysSo) {
  Agent a("a"), b("b", 0, "token", kCopyBytes - 1);
  ASSERT_TRUE(Add(*a.store, 0, {1, 10}).ok());

  const Ended pushed = Push(a, b, {{0, {1, 10}}});

  EXPECT_EQ(pushed.outcome.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(MessageOf(pushed.outcome)), HasSubstr("node 'b': copy of rank 0"));
}

TEST(ReplicaLink, AnotherTokenOrAnOlderGenerationBringsNothing) {
  Agent a("a"), stranger("b", 0, "another");
  ASSERT_TRUE(Add(*a.store, 0, {1, 10}).ok());
  EXPECT_FALSE(Push(a, stranger, {{0, {1, 10}}}).outcome.ok());

  Agent b("b");
  b.link->Enter(kRun, 2, {"a", "b"});
  EXPECT_FALSE(Push(a, b, {{0, {1, 10}}}).outcome.ok());
  EXPECT_THAT(b.store->Names(), IsEmpty());
}

TEST(ReplicaLink, AGenerationsEndEndsItsTransfers) {
  Agent a("a", 100'000), b("b");  // 2 MiB take 20 s
  ASSERT_TRUE(Add(*a.store, 0, {1, 10}).ok());

  const Ended pushed = Wait([&](ReplicaLink::Done done) {
    a.link->Push("b", b.link->address(), {{0, {1, 10}}}, std::nullopt, std::move(done));
    a.link->Enter(kRun, 2, {"a", "b"});
  });

  EXPECT_EQ(pushed.outcome.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(b.store->Names(), IsEmpty());
}

TEST(ReplicaLink, APartnerThatGoesEndsThePushAndLeavesNothingHere) {
  Agent a("a", 100'000);
  auto b = std::make_unique<Agent>("b");
  ASSERT_TRUE(Add(*a.store, 0, {1, 10}).ok());

  const Ended pushed = Wait([&](ReplicaLink::Done done) {
    a.link->Push("b", b->link->address(), {{0, {1, 10}}}, std::nullopt, std::move(done));
    b.reset();
  });

  EXPECT_FALSE(pushed.outcome.ok());
  EXPECT_NE(a.store->Find({0, {1, 10}}), nullptr) << "its own copy stays";
}

// 2.1 MB at 4 MB/s, of which a tenth of a second's, or a chunk, may go at once.
TEST(ReplicaLink, GoesNoFasterThanAllowed) {
  Agent a("a", 4'000'000), b("b");
  ASSERT_TRUE(Add(*a.store, 0, {1, 10}).ok());
  const absl::Duration began = Clock::Real().Uptime();

  ASSERT_TRUE(Push(a, b, {{0, {1, 10}}}).outcome.ok());

  const double bytes = kImage + kReplicated - (1 << 20);
  EXPECT_GE(Clock::Real().Uptime() - began, absl::Seconds(bytes / 4e6));
}

}  // namespace
}  // namespace outlast
