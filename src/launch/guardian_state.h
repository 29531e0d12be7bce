// The guardian's own state, of which two files make its life: guardian_process.cc, in which it
// obeys an agent, and guardian_alone.cc, in which it waits for the next one.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/channel.h"
#include "launch/birth.h"
#include "launch/guardian.h"
#include "launch/guardian_wire.h"
#include "launch/process.h"
#include "launch/template_process.h"
#include "outlast/base/fd.h"
#include "run/vault.h"
#include "run/wire.h"

namespace outlast {

// One worker, from its fork until nothing of its tree is left.
struct Ward {
  uint64_t incarnation = 0;
  pid_t pid = 0;
  std::string tag;
  UniqueFd failure;          // the reading end of the exec pipe; closed: it was forked
  std::optional<Gate> gate;  // forked, and not let go yet
  uint16_t master_port = 0;  // of a gated one
  bool is_master = false;
  bool asked_to_end = false;  // by a signal that a trainer may answer in its own time
  bool killing = false;
  bool stuck_told = false;
  int64_t killing_since = 0;
  bool ended = false;  // a zombie that keeps its pid ours until the tree is gone
  bool end_told = false;
  int code = 0, signal = 0;
};

// What the next agent must hear of a slot's newest process, however long ago that was told.
struct Fate {
  uint64_t incarnation = 0;
  pid_t pid = 0;  // 0: it waits to be born
  bool is_forked = false;
  bool has_exited = false, is_gone = false;
  int code = 0, signal = 0;
  std::string error;
};

class GuardianProcess {
 public:
  GuardianProcess(const GuardianCommand& command, Channel agent, pid_t agent_pid, UniqueFd door)
      : command_(command),
        agent_(std::move(agent)),
        self_(getpid()),
        agent_pid_(agent_pid),
        door_(std::move(door)) {}

  bool SetUp();
  void Serve();
  // The agent was killed, and its workers are gone: writes the end of its ledger.
  void CompleteLedgerOfAgent() const;
  // Nobody can adopt any more: the listener goes before the workers do.
  void CloseDoor();
  void RemoveFile() const;

 private:
  bool TakeOrder();
  void TakeBirth(PayloadReader& order, int slot, uint64_t incarnation, std::vector<UniqueFd> fds);
  // A slot keeps its box for the whole job.
  void KeepBlackBox(const Birth& birth);
  void Deliver(Birth birth);
  void StartTemplate(PayloadReader& order, std::vector<UniqueFd> fds);
  // False: a fresh process is wanted.
  bool AskTemplate(Birth& birth);
  void ListenToTemplate(bool is_readable);
  void TakeNewsOfTemplate();
  void Adopt(TemplateProcess::News::Forked forked);
  void OpenGates();
  bool is_behind_master(const Ward& ward);
  std::string TagOf(const Birth& birth) const;
  int PollMillis() const;
  void RefuseBirth(const Birth& birth, std::string_view why);
  void CancelBirth(int slot, uint64_t incarnation);

  void Forward(Ward& ward, int signal);
  void SignalTree(const Ward& ward, int signal);
  void BeginKill(Ward& ward);

  // Without an agent.
  bool has_agent() const { return agent_.fd() >= 0; }
  bool MayOutliveAgent();
  void LoseAgent();
  void EndGenerationOf(uint64_t generation) const;
  void Meet();
  void Hear();
  void RefuseCandidate(const std::string& why);
  bool Welcome();
  bool Replay(int slot, const Fate& fate);
  void Remember(GuardianReportKind kind, int slot, uint64_t incarnation, int value, int signal,
                std::string_view error);

  void Reap();
  void Settle();
  void RefuseBirthsIfStuck();
  bool SettleWard(int slot, Ward& ward);
  void TellEnd(int slot, Ward& ward);
  bool is_killing() const;

  // The slot's living processes and zombies but for its worker's own, parents first.
  std::vector<ProcessInfo> TreeOf(const Ward& ward, bool with_worker) const;
  void Report(GuardianReportKind kind, int slot, uint64_t incarnation, int value, int signal,
              std::string_view error = {}, int fd = -1);
  static bool Say(const Channel& to, GuardianReportKind kind, int slot, uint64_t incarnation,
                  int value, int signal, std::string_view error, std::span<const int> fds = {},
                  std::string_view more = {});

  const GuardianCommand& command_;
  Channel agent_;
  const pid_t self_;
  UniqueFd child_ended_;                 // a signalfd
  std::map<int, Ward> wards_;            // by slot
  std::deque<Birth> births_;             // wait until no tree is being killed
  std::map<int, UniqueFd> black_boxes_;  // by slot
  std::optional<TemplateProcess> template_;
  struct Master {
    uint16_t port = 0;  // 0: nobody waits for one
    int64_t due = 0;
  };
  Master master_;  // the rank 0 that was let go last
  std::string run_dir_;
  bool was_told_to_finish_ = false;
  bool was_terminated_ = false;  // since an agent came last
  // For the next agent.
  Kept kept_;
  std::map<int, Fate> fates_;  // by slot
  pid_t agent_pid_;
  UniqueFd door_;      // listens for one; closed: nobody may come
  Channel candidate_;  // connected, and has not said yet what it wants
  pid_t candidate_pid_ = 0;
  int64_t candidate_due_ = 0;
  int64_t adopt_due_ = 0;            // while there is no agent
  bool is_template_untold_ = false;  // it became ready then
};

}  // namespace outlast
