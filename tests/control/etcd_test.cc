// The seat that etcd gives, against a real etcd.
#include <gmock/gmock.h>

#include "control/etcd_flags.h"
#include "control/etcd_keys.h"
#include "control/etcd_seat.h"
#include "outlast/elastic/journal.h"
#include "tests/control/control_fixture.h"
#include "tests/support/etcd_server.h"

namespace outlast::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(EtcdEndpoints, AreHostsAndPortsWithCommasBetweenThem) {
  using Endpoints = std::vector<std::string>;
  EXPECT_EQ(ParseEtcdAddress("node7:2379")->endpoints, Endpoints{"node7:2379"});
  EXPECT_EQ(ParseEtcdAddress("etcd://10.0.0.1:2379,[::1]:2380")->endpoints,
            (Endpoints{"10.0.0.1:2379", "[::1]:2380"}));
  EXPECT_FALSE(ParseEtcdAddress("etcd://a:1")->uses_tls);
  for (const char* text : {"etcd+https://a:1,b:2", "https://a:1,https://b:2"}) {
    ASSERT_TRUE(ParseEtcdAddress(text).ok()) << text;
    EXPECT_EQ(ParseEtcdAddress(text)->endpoints, (Endpoints{"a:1", "b:2"})) << text;
    EXPECT_TRUE(ParseEtcdAddress(text)->uses_tls) << text;
  }
  for (const char* text : {"", "etcd://", "node7", "a:1,", "a:0", "http://a:1", "etcd://a:1/b",
                           "https://a:1,b:1", "etcd://https://a:1", "etcd+https://https://a:1"})
    EXPECT_FALSE(ParseEtcdAddress(text).ok()) << text;
}

TEST(EtcdLeader, IsReadBackAndNothingElseIs) {
  const auto leader = EtcdLeader::Parse(EtcdLeader{"1", "\"a\" \xff", "h:1"}.text());
  ASSERT_TRUE(leader);
  EXPECT_EQ(leader->address, "h:1");
  for (const char* text : {"", "{", "[]", "7"}) EXPECT_FALSE(EtcdLeader::Parse(text)) << text;
  EXPECT_EQ(EtcdLeader::Parse("{\"address\": 7}")->address, "");
}

TEST(EtcdOver, IsReadBackAndNothingElseIs) {
  EXPECT_EQ(EtcdOver::Parse(EtcdOver{"7", 83, "why"}.text())->exit_code, 83);
  for (const char* text : {"", "{}", "{\"exit_code\": 256}", "{\"exit_code\": -1}",
                           "{\"exit_code\": \"0\"}", "{\"exit_code\": 1e99}"})
    EXPECT_FALSE(EtcdOver::Parse(text)) << text;
}

// Nobody answers, or the user has lost the right to ask while the job runs.
class AskedAgain : public ControlTest, public ::testing::WithParamInterface<absl::StatusCode> {};
INSTANTIATE_TEST_SUITE_P(Etcd, AskedAgain,
                         ::testing::Values(absl::StatusCode::kUnavailable,
                                           absl::StatusCode::kFailedPrecondition));

TEST_P(AskedAgain, AnAgentThatCanAskNobodyGoesWhereItsCoordinatorWasLast) {
  ASSERT_TRUE(StartHost(HostOptions(1)).ok());
  const std::string address = host_->address();
  AgentLinkOptions link = LinkOptions(0);
  link.coordinator = "etcd";
  link.find = [address, first = true]() mutable -> absl::StatusOr<std::string> {
    if (std::exchange(first, false)) return address;
    return absl::Status(GetParam(), "no answer");
  };
  StartNode(0, link);
  ASSERT_TRUE(AllOpen(1, 1));

  loop_.Do([this] { host_.reset(); });
  CoordinatorHostOptions again = HostOptions(1);
  again.listen = address;
  ASSERT_TRUE(StartHost(again).ok());

  loop_.Do([&] {
    nodes_[0]->Give(WorkerFinished{0, 1});
    nodes_[0]->Give(WorkerEnded{0, 1, {}});
  });
  EXPECT_TRUE(loop_.WaitFor([&] { return ended_.size() == 1; }));
}

TEST_F(ControlTest, AnAgentThatMayNotAskIsRefusedAtOnce) {
  AgentLinkOptions link = LinkOptions(0);
  link.coordinator = "etcd";
  link.find = []() -> absl::StatusOr<std::string> {
    return absl::FailedPreconditionError("etcd refuses: h:1: invalid user ID or password");
  };

  StartNode(0, link);

  EXPECT_TRUE(loop_.WaitFor([&] { return ended_.size() == 1; }));
  EXPECT_EQ(ended_[0].exit_code, 85);
  EXPECT_THAT(ended_[0].reason, HasSubstr("invalid user ID or password"));
}

class EtcdSeats : public ::testing::Test {
 protected:
  struct Seen {
    std::vector<std::string> lines;
    int elected = 0, announced = 0;
    std::unique_ptr<CoordinatorJournal> journal;
    std::string lost;
    std::optional<int> ended;
    std::string reason;
  };

  void SetUp() override {
    OUTLAST_ETCD_OR_SKIP();
    etcd_ = std::make_unique<EtcdServer>();
    client_ = control::LoadEtcd(etcd_->servers()).value();
  }
  ~EtcdSeats() override {
    loop_.Do([this] { seats_.clear(); });
  }

  // Of a short lease: each third of it its holder looks.
  static EtcdSeatOptions Short() {
    return {.lease = absl::Seconds(static_cast<int>(3 * TimeFactor()))};
  }
  void Sit(int index, EtcdSeatOptions options = {}) {
    if (options.job.empty()) options.job = "job";
    options.name = "seat " + std::to_string(index);
    const auto note = [this, index](const std::function<void(Seen&)>& change) {
      loop_.Note([&] { change(seen_[index]); });
    };
    EtcdSeat::Ears ears;
    ears.on_line = [note](const std::string& line) {
      note([&](Seen& seen) { seen.lines.push_back(line); });
    };
    ears.on_elected = [note](std::unique_ptr<CoordinatorJournal> journal) {
      note([&](Seen& seen) {
        ++seen.elected;
        seen.journal = std::move(journal);
      });
    };
    ears.on_announced = [note] { note([](Seen& seen) { ++seen.announced; }); };
    ears.on_lost = [note](const std::string& why) { note([&](Seen& seen) { seen.lost = why; }); };
    ears.on_end = [note](int code, const std::string& reason) {
      note([&](Seen& seen) {
        seen.ended = code;
        seen.reason = reason;
      });
    };
    loop_.Do([&] {
      seats_[index] = std::make_unique<EtcdSeat>(loop_.loop(), client_, options, std::move(ears));
    });
  }
  bool Leads(int index, int times = 1) {
    return loop_.WaitFor([&] { return seen_[index].elected == times; });
  }
  bool Says(int index, const std::string& part) {
    return loop_.WaitFor([&] {
      for (const std::string& line : seen_[index].lines) {
        if (line.find(part) != std::string::npos) return true;
      }
      return false;
    });
  }
  bool Ends(int index) {
    return loop_.WaitFor([&] { return seen_[index].ended.has_value(); });
  }
  void Leave(int index) {
    loop_.Do([&] { seats_.erase(index); });
  }
  // As whoever has the journal at hand; it is its last record where `ends`.
  absl::Status Append(int index, CoordinatorState& state, bool ends = false) {
    return Append(index, state,
                  ends ? JournalPayload(EndedRecord{7, "done"})
                       : JournalPayload(StartedRecord{.incarnation = state.incarnation + 1}));
  }
  absl::Status Append(int index, CoordinatorState& state, const JournalPayload& record) {
    const std::string bytes = EncodeJournalRecord(state, record);
    state.Apply(record);
    return seen_[index].journal->Append(bytes);
  }
  std::vector<std::string> Keys(const std::string& job = "job") {
    std::vector<std::string> keys;
    for (const control::EtcdKey& key : client_->Read("/outlast/v1/" + job + "/", "", 100).keys)
      keys.push_back(key.key);
    return keys;
  }
  // By a person, or by an etcd that lost it.
  void DeleteLeader() {
    control::EtcdTransaction mischief;
    mischief.deletes = {EtcdKeys("job").leader};
    ASSERT_TRUE(client_->Commit(mischief).done());
  }

  std::unique_ptr<EtcdServer> etcd_;
  std::shared_ptr<control::EtcdClient> client_;
  LoopThread loop_;
  std::map<int, Seen> seen_;
  std::map<int, std::unique_ptr<EtcdSeat>> seats_;
};

TEST_F(EtcdSeats, OneLeadsAndTheNextGoesOnWhereItsJournalEnds) {
  Sit(1);
  ASSERT_TRUE(Leads(1));
  Sit(2);
  ASSERT_TRUE(Says(2, "stands by: seat 1 leads job job"));
  CoordinatorState state;
  for (int i = 0; i < 300; ++i) ASSERT_TRUE(Append(1, state).ok()) << i;  // more than one read's
  const uint64_t former = seen_[1].journal->least_incarnation();

  Leave(1);  // long before its lease of 10 s has run out

  ASSERT_TRUE(Leads(2));
  EXPECT_EQ(seen_[2].journal->state().records, 300u);
  EXPECT_EQ(seen_[2].journal->state().incarnation, 300u);
  EXPECT_GT(seen_[2].journal->least_incarnation(), former);
}

TEST_F(EtcdSeats, TheNextGoesOnFromABaseAndTheRecordsBeforeItAreGone) {
  Sit(1);
  ASSERT_TRUE(Leads(1));
  CoordinatorState state;
  for (int i = 0; i < 300; ++i) ASSERT_TRUE(Append(1, state).ok()) << i;

  for (int i = 0; i < 2; ++i)  // one that had no answer is done once more
    ASSERT_TRUE(seen_[1].journal->Compact(EncodeJournalBase(state)).ok());

  EXPECT_THAT(Keys(), ::testing::ElementsAre("/outlast/v1/job/journal/000000000000012b",
                                             "/outlast/v1/job/leader", "/outlast/v1/job/run"));
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(Append(1, state).ok()) << i;
  Sit(2);
  ASSERT_TRUE(Says(2, "stands by"));
  Leave(1);
  ASSERT_TRUE(Leads(2));
  EXPECT_EQ(seen_[2].journal->state().records, 303u);
  EXPECT_EQ(seen_[2].journal->state().incarnation, 303u);
  CoordinatorState next = seen_[2].journal->state();
  EXPECT_TRUE(Append(2, next).ok());
}

TEST_F(EtcdSeats, ADeposedOneWritesNothingMore) {
  Sit(1, Short());
  ASSERT_TRUE(Leads(1));
  CoordinatorState state;
  ASSERT_TRUE(Append(1, state).ok());
  DeleteLeader();
  Sit(2);
  ASSERT_TRUE(Leads(2));
  CoordinatorState next = seen_[2].journal->state();

  const std::string base = EncodeJournalBase(state);
  EXPECT_EQ(Append(1, state).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(seen_[1].journal->Compact(base).code(), absl::StatusCode::kAborted);

  EXPECT_TRUE(Append(2, next).ok());
  EXPECT_TRUE(loop_.WaitFor([&] { return seen_[1].lost == "its key in etcd is gone"; }));
  loop_.Do([this] { seats_[1]->StepDown(); });
  EXPECT_TRUE(Says(1, "stands by: seat 2 leads job job"));
}

TEST_F(EtcdSeats, AnAddressIsFoundFromWhenItWasAnnouncedUntilItsLeaderLeaves) {
  EXPECT_THAT(std::string(FindEtcdLeader(*client_, "job").status().message()),
              HasSubstr("nobody leads job job"));
  Sit(1);
  ASSERT_TRUE(Leads(1));
  EXPECT_THAT(std::string(FindEtcdLeader(*client_, "job").status().message()),
              HasSubstr("seat 1 leads job job, and does not listen yet"));
  loop_.Do([this] { seats_[1]->Announce("node7:29400"); });
  ASSERT_TRUE(loop_.WaitFor([&] { return seen_[1].announced == 1; }));
  EXPECT_EQ(FindEtcdLeader(*client_, "job").value(), "node7:29400");
  EXPECT_FALSE(FindEtcdLeader(*client_, "jo").ok());
  Leave(1);
  EXPECT_FALSE(FindEtcdLeader(*client_, "job").ok());
}

TEST_F(EtcdSeats, ARunsEndEndsThoseWhoStandByAndTheNextRunBeginsWithoutItsRecords) {
  Sit(1);
  ASSERT_TRUE(Leads(1));
  Sit(2);
  ASSERT_TRUE(Says(2, "stands by"));
  CoordinatorState state;
  for (const bool ends : {false, false, true}) ASSERT_TRUE(Append(1, state, ends).ok());
  loop_.Do([this] { seats_[1]->EndRun(7, "done"); });
  Leave(1);
  ASSERT_TRUE(Ends(2));
  EXPECT_EQ(seen_[2].ended, 7);
  EXPECT_EQ(seen_[2].reason, "done");

  Sit(3);

  ASSERT_TRUE(Leads(3));
  EXPECT_EQ(seen_[3].journal->state().records, 0u);
  EXPECT_THAT(Keys(), ::testing::ElementsAre("/outlast/v1/job/leader", "/outlast/v1/job/run"));
}

TEST_F(EtcdSeats, OneThatIsNotStartedAsTheJobsAgentsDoesNotStandBy) {
  Sit(1);
  ASSERT_TRUE(Leads(1));
  Sit(2, {.terms = {{"-n", "2"}}});
  Sit(3, {.terms = {{"-n", "4"}}});
  for (const int early : {2, 3}) ASSERT_TRUE(Says(early, "stands by: seat 1"));
  CoordinatorState state;
  ASSERT_TRUE(Append(1, state, TermsRecord{"a", {{"-n", "2"}}}).ok());
  ASSERT_TRUE(Append(1, state, CommittedRecord{{.generation = 1}}).ok());
  Sit(4, {.terms = {{"-n", "4"}}});

  for (const int unlike : {3, 4}) {
    ASSERT_TRUE(Ends(unlike)) << unlike;
    EXPECT_EQ(seen_[unlike].ended, 85);
    EXPECT_THAT(seen_[unlike].reason, HasSubstr("-n 4, 2 wanted"));
  }
  Leave(1);
  EXPECT_TRUE(Leads(2));
}

TEST_F(EtcdSeats, JobsAreApart) {
  Sit(1);
  Sit(2, {.job = "job2"});
  ASSERT_TRUE(Leads(1));
  ASSERT_TRUE(Leads(2));
  CoordinatorState state;
  ASSERT_TRUE(Append(2, state).ok());
  EXPECT_EQ(Keys("job").size(), 2u);
  EXPECT_EQ(Keys("job2").size(), 3u);
}

TEST_F(EtcdSeats, AJournalThatIsGoneIsNoNewJob) {
  Sit(1, Short());
  ASSERT_TRUE(Leads(1));
  control::EtcdTransaction mischief;
  mischief.delete_folders = {EtcdKeys("job").folder};
  ASSERT_TRUE(client_->Commit(mischief).done());
  ASSERT_TRUE(loop_.WaitFor([&] { return !seen_[1].lost.empty(); }));
  loop_.Do([this] { seats_[1]->StepDown(); });
  ASSERT_TRUE(Ends(1));
  EXPECT_EQ(seen_[1].ended, 84);
  EXPECT_THAT(seen_[1].reason, HasSubstr("journal of job job is gone"));
}

TEST_F(EtcdSeats, ADamagedJournalIsRefused) {
  Sit(1);
  ASSERT_TRUE(Leads(1));
  ASSERT_TRUE(seen_[1].journal->Append("nonsense").ok());
  Leave(1);
  Sit(2);
  ASSERT_TRUE(Ends(2));
  EXPECT_EQ(seen_[2].ended, 85);
  EXPECT_THAT(seen_[2].reason, HasSubstr("/outlast/v1/job/journal/"));
}

TEST_F(EtcdSeats, AnEtcdThatComesBackInTimeIsWaitedForByAnAppend) {
  Sit(1, {.lease = absl::Seconds(60)});
  ASSERT_TRUE(Leads(1));
  etcd_->Kill();
  CoordinatorState state;
  absl::Status appended = absl::UnknownError("");
  std::thread writer([&] { appended = Append(1, state); });
  etcd_->Start();
  writer.join();
  EXPECT_TRUE(appended.ok()) << appended;
  EXPECT_EQ(Keys().size(), 3u);
  EXPECT_EQ(seen_[1].lost, "");
}

TEST_F(EtcdSeats, AnEtcdThatStaysAwayEndsALeaseAndThenTheSeat) {
  Sit(1, {.lease = absl::Seconds(2), .grace = absl::Seconds(3)});
  ASSERT_TRUE(Leads(1));
  etcd_->Kill();
  ASSERT_TRUE(Says(1, "etcd does not answer"));
  ASSERT_TRUE(loop_.WaitFor([&] { return !seen_[1].lost.empty(); }));
  CoordinatorState state;
  EXPECT_EQ(Append(1, state).code(), absl::StatusCode::kAborted);
  loop_.Do([this] { seats_[1]->StepDown(); });
  ASSERT_TRUE(Ends(1));
  EXPECT_EQ(seen_[1].ended, 84);
}

// --- Whom etcd trusts ---

class EtcdTrust : public ::testing::Test {
 protected:
  using Outcome = control::EtcdReply::Outcome;

  void SetUp() override { OUTLAST_ETCD_OR_SKIP(); }
  static control::EtcdReply Write(control::EtcdClient& client, const std::string& key) {
    control::EtcdTransaction write;
    write.puts = {{key, "value"}};
    return client.Commit(write);
  }
};

TEST_F(EtcdTrust, OneThatWantsCertificatesIsReachedWithThemAndNotWithoutOrWithAStrangers) {
  EtcdServer etcd(EtcdServer::Tls::kBothSides);
  const auto trusted = control::LoadEtcd(etcd.servers()).value();
  EXPECT_TRUE(Write(*trusted, "/outlast/key").done());
  EXPECT_EQ(trusted->Read("/outlast/", "", 7).keys.size(), 1u);

  control::EtcdServers none = etcd.servers(), stranger = none, other_ca = none, plain = none;
  none.certificates.key = none.certificates.certificate = "";
  stranger.certificates =
      ReadCertificates(etcd.Path("ca.pem"), etcd.Path("stranger.pem"), etcd.Path("stranger.key"))
          .value();
  other_ca.certificates.ca = ReadCertificates(etcd.Path("other.pem"), "", "")->ca;
  plain.uses_tls = false;
  for (const control::EtcdServers& servers : {none, stranger, other_ca, plain}) {
    const control::EtcdReply reply = control::LoadEtcd(servers).value()->Read("/outlast/", "", 7);
    EXPECT_EQ(reply.outcome, Outcome::kUnreached) << reply.why;
    EXPECT_THAT(reply.why, HasSubstr(etcd.endpoint()));
  }
}

TEST_F(EtcdTrust, AUserReachesTheKeysThatItMayAndAStrangerIsRefused) {
  EtcdServer etcd;
  control::EtcdServers servers = etcd.servers();
  servers.user = "ada";
  servers.password = "secret";
  const auto ada = control::LoadEtcd(servers).value();
  ASSERT_TRUE(Write(*ada, "/outlast/v1/job/early").done()) << "etcd wants no users yet";
  etcd.WantUsers("ada", "job");

  EXPECT_TRUE(Write(*ada, "/outlast/v1/job/key").done());
  EXPECT_EQ(ada->Read("/outlast/v1/job/", "", 7).keys.size(), 2u);
  const control::EtcdReply lease = ada->Grant(60);
  EXPECT_TRUE(lease.done());
  EXPECT_EQ(ada->KeepAlive(lease.lease).ttl_seconds, 60);
  EXPECT_EQ(Write(*ada, "/outlast/v1/other/key").outcome, Outcome::kRefused);
  EXPECT_THAT(Write(*ada, "/outlast/v1/other/key").why, HasSubstr("permission denied"));
  const auto nobody = control::LoadEtcd(etcd.servers()).value();
  EXPECT_EQ(Write(*nobody, "/outlast/v1/job/key").outcome, Outcome::kRefused);
  servers.password = "guess";
  const control::EtcdReply guessed =
      Write(*control::LoadEtcd(servers).value(), "/outlast/v1/job/key");
  EXPECT_EQ(guessed.outcome, Outcome::kRefused);
  EXPECT_THAT(guessed.why, HasSubstr("invalid user ID or password"));
  EXPECT_THAT(guessed.why, HasSubstr(etcd.endpoint()));
  EXPECT_THAT(guessed.why, HasSubstr("as user 'ada'"));

  etcd.Kill();  // it forgets its tokens
  etcd.Start();
  EXPECT_TRUE(Write(*ada, "/outlast/v1/job/key").done());
}

TEST(EtcdFlags, NameWhatContradictsAndWhatIsMissing) {
  const TempFolder folder;
  const std::string password = folder / "password";
  std::ofstream(password) << "secret\n";
  ASSERT_EQ(chmod(password.c_str(), 0600), 0);
  const auto why = [](const std::string& address, const EtcdFlags& flags) {
    const auto servers = ReadEtcd(address, flags);
    return servers.ok() ? "ok" : std::string(MessageOf(servers.status()));
  };
  EXPECT_EQ(ReadEtcd("127.0.0.1:1", {.user = "ada", .password_file = password})->password,
            "secret");
  EXPECT_THAT(why("etcd+https://h:1", {}), HasSubstr("--etcd-ca"));
  EXPECT_THAT(why("h:1", {.ca = "ca.pem"}), HasSubstr("https:// wanted"));
  EXPECT_THAT(why("127.0.0.1:1", {.user = "ada"}), HasSubstr("both or none wanted"));
  EXPECT_THAT(why("127.0.0.1:1,h:1", {.user = "ada", .password_file = password}),
              HasSubstr("for all to read, https:// wanted"));
  ASSERT_EQ(chmod(password.c_str(), 0644), 0);
  EXPECT_THAT(why("127.0.0.1:1", {.user = "ada", .password_file = password}),
              HasSubstr("mode 0644 lets others read"));
}

TEST(EtcdSeat, WithoutAnEtcdEndsWhenTheFirstAnswerDoesNotCome) {
  LoopThread loop;
  std::optional<int> ended;
  std::unique_ptr<EtcdSeat> seat;
  MasterPorts ports("127.0.0.1");  // held: nobody listens there
  const auto client =
      control::LoadEtcd({.endpoints = {"127.0.0.1:" + std::to_string(ports.Of(1).value())}})
          .value();
  loop.Do([&] {
    EtcdSeat::Ears ears;
    ears.on_end = [&](int code, const std::string&) { loop.Note([&] { ended = code; }); };
    seat = std::make_unique<EtcdSeat>(
        loop.loop(), client, EtcdSeatOptions{.job = "job", .first_answer = absl::Milliseconds(300)},
        std::move(ears));
  });
  EXPECT_TRUE(loop.WaitFor([&] { return ended == 85; }));
  loop.Do([&] { seat.reset(); });
}

}  // namespace
}  // namespace outlast::testing
