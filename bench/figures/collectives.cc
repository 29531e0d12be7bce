// An all-reduce between nodes that are ranks with loopback addresses of their own.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/socket.h"
#include "figures/figures.h"
#include "outlast/base/clock.h"
#include "outlast/testing/local_world.h"
#include "run/group_access.h"

namespace outlast::bench {
namespace {

double MillisSince(int64_t start_ns) {
  return static_cast<double>(MonotonicNanos() - start_ns) / 1e6;
}

// Milliseconds of each all-reduce of `bytes` on rank 0 of `nodes` nodes with one rank each.
absl::StatusOr<std::vector<double>> TimeAllReduces(int nodes, size_t bytes, int rounds) {
  std::vector<double> samples;
  testing::LocalWorld world(nodes);
  const testing::LocalWorldResult result = world.Run([&](Run& run) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      GroupPlace place{.address = fmt::format("127.0.0.{}", generation.rank() + 1)};
      for (int rank = 0; rank < nodes; ++rank) place.node_of.push_back(rank);
      OUTLAST_ASSIGN_OR_RETURN(Group group,
                               GroupAccess::Make(generation, run, "bench", bytes, place));
      std::vector<float> data(bytes / sizeof(float), 1.0f);
      for (int round = -2; round < rounds; ++round) {  // two to warm up
        OUTLAST_RETURN_IF_ERROR(group.Barrier());
        const int64_t start_ns = MonotonicNanos();
        OUTLAST_RETURN_IF_ERROR(group.AllReduceSum(data));
        if (round >= 0 && generation.rank() == 0) samples.push_back(MillisSince(start_ns));
      }
      return absl::OkStatus();
    });
  });
  if (result.exit_code != 0) return MakeStatus(absl::StatusCode::kInternal, result.reason);
  return samples;
}

// Milliseconds of `bytes` over one loopback connection, from the first to the last that was read.
absl::StatusOr<double> TimeLoopback(size_t bytes) {
  OUTLAST_ASSIGN_OR_RETURN(const SocketAddress any, NumericAddress({"127.0.0.1", 0}));
  OUTLAST_ASSIGN_OR_RETURN(const UniqueFd listener, ListenOn(any));
  OUTLAST_ASSIGN_OR_RETURN(const SocketAddress at, SocketAddress::Local(listener.get()));
  OUTLAST_ASSIGN_OR_RETURN(const UniqueFd sender, StartConnect(at));
  pollfd came{.fd = listener.get(), .events = POLLIN};
  poll(&came, 1, 5'000);
  OUTLAST_ASSIGN_OR_RETURN(const UniqueFd receiver, AcceptOn(listener.get()));
  const int64_t start_ns = MonotonicNanos();
  std::thread sending([&] {
    const std::string piece(256 << 10, 'x');
    for (size_t sent = 0; sent < bytes;) {
      pollfd takes{.fd = sender.get(), .events = POLLOUT};
      poll(&takes, 1, 5'000);
      const ssize_t count =
          send(sender.get(), piece.data(), std::min(piece.size(), bytes - sent), 0);
      if (count > 0) sent += static_cast<size_t>(count);
    }
  });
  std::string piece(256 << 10, 'x');
  for (size_t got = 0; got < bytes;) {
    pollfd readable{.fd = receiver.get(), .events = POLLIN};
    poll(&readable, 1, 5'000);
    const ssize_t count = recv(receiver.get(), piece.data(), piece.size(), 0);
    if (count > 0) got += static_cast<size_t>(count);
  }
  const double millis = MillisSince(start_ns);
  sending.join();
  return millis;
}

absl::Status MeasureAllReduce(const Settings& settings, Report& report, int nodes, size_t bytes,
                              const std::string& name, double goal_ms) {
  const int rounds = settings.smoke ? 2 : bytes > (8 << 20) ? 21 : 101;
  Figure figure{.name = name, .unit = "ms", .goal = goal_ms};
  OUTLAST_ASSIGN_OR_RETURN(figure.samples, TimeAllReduces(nodes, bytes, rounds));
  // Each edge carries the bytes once each way; here all edges share the machine's cores.
  const size_t carried = 2 * bytes * static_cast<size_t>(nodes - 1);
  std::vector<double> plain;
  for (int i = 0; i < (settings.smoke ? 1 : 7); ++i) {
    OUTLAST_ASSIGN_OR_RETURN(const double millis, TimeLoopback(carried));
    plain.push_back(millis);
  }
  figure.limit = Reference{"the same bytes over one loopback connection", Quantile(plain, 0.5)};
  report.Add(figure);
  return absl::OkStatus();
}

}  // namespace

void MeasureCollectives(const Settings& settings, Report& report) {
  constexpr size_t kSmall = 1 << 20, kLarge = 64 << 20;
  struct Case {
    const char* name;
    int nodes;
    size_t bytes;
    double goal_ms;
  };
  for (const Case& one :
       {Case{"allreduce.2_nodes_1mb", 2, kSmall, 1}, Case{"allreduce.4_nodes_1mb", 4, kSmall, 3},
        Case{"allreduce.2_nodes_64mb", 2, kLarge, 80},
        Case{"allreduce.4_nodes_64mb", 4, kLarge, 200}}) {
    report.Measure({one.name}, [&] {
      return MeasureAllReduce(settings, report, one.nodes, one.bytes, one.name, one.goal_ms);
    });
  }
}

}  // namespace outlast::bench
