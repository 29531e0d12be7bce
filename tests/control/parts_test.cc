// Endpoints, tokens and the journal's file: without a stream.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "control/endpoint.h"
#include "control/journal_file.h"
#include "control/node_flags.h"
#include "control/token.h"
#include "outlast/base/status.h"
#include "tests/support/temp_folder.h"

namespace outlast {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

// --- Endpoints ---

TEST(Endpoint, IsMineByAddressAndNeverByName) {
  const std::vector<std::string> own = {"127.0.0.1", "10.0.0.7"};
  EXPECT_TRUE(IsMine(std::vector<std::string>{"10.0.0.8", "10.0.0.7"}, own));
  EXPECT_FALSE(IsMine(std::vector<std::string>{"127.0.0.2"}, own));
  EXPECT_THAT(LocalAddresses(), Contains("127.0.0.1"));
}

TEST(Endpoint, KnowsLoopback) {
  EXPECT_TRUE(IsLoopback("127.9.8.7"));
  EXPECT_TRUE(IsLoopback("::1"));
  EXPECT_FALSE(IsLoopback("0.0.0.0"));
  EXPECT_FALSE(IsLoopback("10.0.0.1"));
}

TEST(Endpoint, KnowsTheAddressesOfNobody) {
  EXPECT_TRUE(IsAnyAddress("0.0.0.0"));
  EXPECT_TRUE(IsAnyAddress("::"));
  EXPECT_TRUE(IsAnyAddress("0:0::0"));
  EXPECT_FALSE(IsAnyAddress("127.0.0.1"));
  EXPECT_FALSE(IsAnyAddress("node0"));
}

// --- Flags ---

TEST(JobTerms, SayWhatAListOfNoCodesMeans) {
  const Terms terms = JobTerms({.no_retry_codes = {}}, 1, {.min = 1, .max = 2}, 0);
  EXPECT_THAT(terms, Contains(Term{"--retry", "all codes"}));
  EXPECT_THAT(terms, Contains(Term{"--no-retry", "no code"}));
}

TEST(BatchFlags, BindAllAgentsAndTheCoordinator) {
  JobOptions job;
  ASSERT_TRUE((BatchFlags{.micro_batches = "24", .ranks_per_replica = "4"}.Read(job).ok()));
  const Terms terms = JobTerms(job, 8, {.min = 1, .max = 3}, 0);
  EXPECT_THAT(terms, Contains(Term{"--micro-batches", "24"}));
  EXPECT_THAT(terms, Contains(Term{"--ranks-per-replica", "4"}));
  const MembershipOptions worlds = MembershipOf(job, 8, {.min = 1, .max = 3});
  EXPECT_EQ(worlds.min_world, 8);
  EXPECT_EQ(worlds.max_world, 24);
  EXPECT_TRUE(FitsWorld(16, worlds)) << "4 replicas, 6 micro-batches each";
  EXPECT_FALSE(FitsWorld(20, worlds)) << "5 replicas";
  EXPECT_FALSE((BatchFlags{.micro_batches = "0"}.Read(job).ok()));
}

// --- Tokens ---

TEST(JobToken, IsReadFromHexOrBytesAndNeverShown) {
  EXPECT_TRUE(JobToken::Parse(std::string(64, 'a') + "\n", "file").ok());
  EXPECT_TRUE(JobToken::Parse(std::string(32, '\x7f'), "file").ok());
  const auto bad = JobToken::Parse("secret", "file t");
  EXPECT_EQ(std::string(MessageOf(bad.status())),
            "file t: 6 bytes, a token of 64 hex digits or of 32 bytes is wanted");
}

TEST(JobToken, AProofServesOneRoleOneJobAndOnePairOfNonces) {
  const JobToken token = *JobToken::Parse(std::string(64, 'a'), "");
  const JobToken other = *JobToken::Parse(std::string(64, 'b'), "");
  const std::string proof = token.Prove("agent", "job", "theirs", "mine");

  EXPECT_TRUE(token.Checks(proof, "agent", "job", "theirs", "mine"));
  EXPECT_FALSE(token.Checks(proof, "coordinator", "job", "theirs", "mine"));
  EXPECT_FALSE(token.Checks(proof, "agent", "other", "theirs", "mine"));
  EXPECT_FALSE(token.Checks(proof, "agent", "job", "mine", "theirs"));
  EXPECT_FALSE(token.Checks("", "agent", "job", "theirs", "mine"));
  EXPECT_FALSE(other.Checks(proof, "agent", "job", "theirs", "mine"));
  EXPECT_FALSE(JobToken().Checks("", "agent", "job", "theirs", "mine"));
}

TEST(JobToken, AFileOfOurOwnMustNotBeOpenToOthers) {
  const TempFolder temp;
  const std::string path = temp.path() + "/token";
  std::ofstream(path) << std::string(64, 'a');
  for (const int mode : {0644, 0640, 0604, 0620, 0610}) {
    ASSERT_EQ(chmod(path.c_str(), static_cast<mode_t>(mode)), 0);
    const auto token = JobToken::Read(path);
    EXPECT_EQ(token.status().code(), absl::StatusCode::kPermissionDenied) << mode;
    EXPECT_THAT(std::string(MessageOf(token.status())), HasSubstr("(chmod 600 " + path + ")"));
  }
  for (const int mode : {0600, 0400}) {
    ASSERT_EQ(chmod(path.c_str(), static_cast<mode_t>(mode)), 0);
    EXPECT_TRUE(JobToken::Read(path).ok()) << mode;
  }
}

// --- The journal's file ---

class JournalFileTest : public ::testing::Test {
 protected:
  std::string Record(const CoordinatorState& state, uint64_t incarnation) {
    return EncodeJournalRecord(state, StartedRecord{Id128::FromName("run"), incarnation});
  }
  const TempFolder temp_;
  const std::string folder_ = temp_.path();
};

TEST_F(JournalFileTest, HoldsWhatWasAppended) {
  {
    auto journal = JournalFile::Open(folder_, "job");
    ASSERT_TRUE(journal.ok());
    ASSERT_TRUE(journal->Append(Record(journal->state(), 1)).ok());
  }
  const auto again = JournalFile::Open(folder_, "job");
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->state().incarnation, 1u);
  EXPECT_EQ(again->torn(), "");
}

TEST_F(JournalFileTest, ATailThatIsCutAtAnyByteIsCutOff) {
  size_t whole = 0;
  std::string second;
  {
    auto journal = JournalFile::Open(folder_, "job");
    CoordinatorState state;
    ASSERT_TRUE(journal->Append(Record(state, 1)).ok());
    state.Apply(StartedRecord{Id128::FromName("run"), 1});
    whole = std::filesystem::file_size(folder_ + "/coordinator.journal");
    second = Record(state, 2);
  }
  for (size_t keep = 1; keep < second.size(); ++keep) {
    std::ofstream(folder_ + "/coordinator.journal", std::ios::app) << second.substr(0, keep);
    const auto again = JournalFile::Open(folder_, "job");
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(again->state().incarnation, 1u);
    EXPECT_NE(again->torn(), "");
    EXPECT_EQ(std::filesystem::file_size(folder_ + "/coordinator.journal"), whole);
  }
}

TEST_F(JournalFileTest, WhatIsCutOffIsKept) {
  { ASSERT_TRUE(JournalFile::Open(folder_, "job")->Append(Record({}, 1)).ok()); }
  std::ofstream(folder_ + "/coordinator.journal", std::ios::app) << "torn";
  ASSERT_TRUE(JournalFile::Open(folder_, "job").ok());
  std::ifstream cut(folder_ + "/coordinator.journal.cut");
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(cut), {}), "torn");
}

TEST_F(JournalFileTest, IsNotMadeOfSomethingElse) {
  const std::string path = folder_ + "/coordinator.journal";
  for (const char byte : {'\xf3', '\0'}) {
    std::ofstream(path) << std::string(3000, byte);
    const auto opened = JournalFile::Open(folder_, "job");
    EXPECT_EQ(opened.status().code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(std::string(MessageOf(opened.status())),
                HasSubstr(byte == '\0' ? "3000 bytes" : "record 0 at offset 0"));
    EXPECT_EQ(std::filesystem::file_size(path), 3000u);
  }
}

TEST_F(JournalFileTest, IsHeldByOneAtATime) {
  const auto first = JournalFile::Open(folder_, "job");
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(JournalFile::Open(folder_, "job").status().code(), absl::StatusCode::kAlreadyExists);
}

TEST_F(JournalFileTest, ABaseReplacesItsRecordsAndIsAppendedTo) {
  CoordinatorState state;
  const auto append = [&](JournalFile& journal) {
    const StartedRecord record{Id128::FromName("run"), state.incarnation + 1};
    ASSERT_TRUE(journal.Append(EncodeJournalRecord(state, record)).ok());
    state.Apply(record);
  };
  std::ofstream(folder_ + "/coordinator.journal.new") << "of one that was killed meanwhile";
  {
    auto journal = JournalFile::Open(folder_, "job");
    ASSERT_TRUE(journal.ok());
    for (int i = 0; i < 100; ++i) append(*journal);
    ASSERT_TRUE(journal->Compact(EncodeJournalBase(state)).ok());
    EXPECT_EQ(std::filesystem::file_size(folder_ + "/coordinator.journal"),
              EncodeJournalBase(state).size());
    append(*journal);
  }
  const auto again = JournalFile::Open(folder_, "job");
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->state().records, 101u);
  EXPECT_EQ(again->state().incarnation, 101u);
  EXPECT_FALSE(std::filesystem::exists(folder_ + "/coordinator.journal.new"));
}

TEST_F(JournalFileTest, ACompactionThatCannotBeWrittenLeavesTheJournalAsItWas) {
  auto journal = JournalFile::Open(folder_, "job");
  ASSERT_TRUE(journal.ok());
  CoordinatorState state;
  ASSERT_TRUE(journal->Append(Record(state, 1)).ok());
  state.Apply(StartedRecord{Id128::FromName("run"), 1});
  std::filesystem::create_directory(folder_ + "/coordinator.journal.new");

  const absl::Status compacted = journal->Compact(EncodeJournalBase(state));

  EXPECT_FALSE(compacted.ok());
  EXPECT_FALSE(absl::IsAborted(compacted));
  EXPECT_TRUE(journal->Append(Record(state, 2)).ok());
}

TEST_F(JournalFileTest, RefusesToAppendAfterAnotherWriter) {
  auto journal = JournalFile::Open(folder_, "job");
  ASSERT_TRUE(journal.ok());
  std::ofstream(folder_ + "/coordinator.journal", std::ios::app) << "x";
  EXPECT_EQ(journal->Append("record").code(), absl::StatusCode::kAborted);
  EXPECT_EQ(journal->Compact("base").code(), absl::StatusCode::kAborted);
}

TEST_F(JournalFileTest, RefusesToAppendToAFileThatWasReplaced) {
  auto journal = JournalFile::Open(folder_, "job");
  ASSERT_TRUE(journal.ok());
  std::ofstream(folder_ + "/other") << "";
  std::filesystem::rename(folder_ + "/other", folder_ + "/coordinator.journal");
  EXPECT_EQ(journal->Append("record").code(), absl::StatusCode::kAborted);
}

}  // namespace
}  // namespace outlast
