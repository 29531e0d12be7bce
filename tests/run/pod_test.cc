#include "run/pod.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "outlast/base/status.h"

namespace outlast {
namespace {

using Set = std::map<std::string, std::string>;
using ::testing::HasSubstr;

Variables In(const Set& set) {
  return [&set](const char* name) {
    const auto found = set.find(name);
    return found == set.end() ? nullptr : found->second.c_str();
  };
}

// "index/node", "none", or why not.
std::string PodIn(const Set& set) {
  const auto pod = FindPod(In(set));
  if (!pod.ok()) return std::string(MessageOf(pod.status()));
  if (!*pod) return "none";
  const std::string node = (*pod)->node ? std::to_string(*(*pod)->node) : "?";
  return std::to_string((*pod)->index) + "/" + node;
}

Set operator+(Set left, const Set& right) {
  for (const auto& [name, value] : right) left[name] = value;
  return left;
}

// What an Indexed Job "gpt" gives its third pod, and a JobSet "set" the second pod of its second
// Job of "workers", where its author wrote the downward API's fields.
const Set kJob{
    {"KUBERNETES_SERVICE_HOST", "10.0.0.1"}, {"HOSTNAME", "gpt-2"}, {"JOB_COMPLETION_INDEX", "2"}};
const Set kJobSet{{"HOSTNAME", "set-workers-1-1"},
                  {"JOB_COMPLETION_INDEX", "1"},
                  {"JOBSET_NAME", "set"},
                  {"REPLICATED_JOB_NAME", "workers"},
                  {"JOB_INDEX", "1"},
                  {"JOB_NAME", "set-workers-1"}};

TEST(FindPod, KnowsAnIndexedJobsPodAndNoOther) {
  EXPECT_EQ(PodIn(kJob), "2/2");
  EXPECT_EQ((*FindPod(In(kJob)))->Text(), "JOB_COMPLETION_INDEX=2 HOSTNAME=gpt-2");
  EXPECT_EQ(PodIn({}), "none");
  EXPECT_EQ(PodIn({{"KUBERNETES_SERVICE_HOST", "10.0.0.1"}, {"HOSTNAME", "gpt-2"}}), "none")
      << "a pod of no Indexed Job";
}

TEST(FindPod, NumbersAJobSetsPodsThroughAllJobsOfTheirTemplate) {
  EXPECT_EQ(PodIn(kJobSet + Set{{"PROCESSES_IN_JOB", "4"}}), "1/5");
  EXPECT_EQ(PodIn(kJobSet), "1/?") << "how many pods the first Job has is not told";
  EXPECT_EQ(PodIn(kJobSet + Set{{"HOSTNAME", "set-workers-0-1"},
                                {"JOB_INDEX", "0"},
                                {"JOB_NAME", "set-workers-0"}}),
            "1/1");
}

TEST(FindPod, TakesTheNamesThatPodsReallyHave) {
  EXPECT_EQ(PodIn(kJob + Set{{"HOSTNAME", "gpt-2.gpt-svc"}, {"JOB_NAME", "gpt"}}), "2/2")
      << "setHostnameAsFQDN";
  EXPECT_EQ(PodIn(kJob + Set{{"HOSTNAME", "gke-pool-7"}, {"JOB_NAME", "gpt"}}), "2/2")
      << "hostNetwork";
  EXPECT_EQ(PodIn(kJobSet + Set{{"HOSTNAME", "node-7"}}), "1/?");
}

TEST(FindPod, RefusesAContradictionAndNamesBothSides) {
  EXPECT_EQ(PodIn(kJob + Set{{"JOB_NAME", "gpt"}, {"HOSTNAME", "gpt-3"}}),
            "contradictory environment: HOSTNAME=gpt-3 and JOB_COMPLETION_INDEX=2: gpt-2 wanted, "
            "or one of the two unset");
  const std::string job = PodIn(kJobSet + Set{{"HOSTNAME", "set-workers-0-1"}});
  EXPECT_THAT(job, HasSubstr("HOSTNAME=set-workers-0-1 and JOBSET_NAME=set REPLICATED_JOB_NAME="));
  EXPECT_THAT(job, HasSubstr("set-workers-1-1 wanted"));
  EXPECT_THAT(PodIn(kJobSet + Set{{"JOB_NAME", "set-workers-2"}, {"HOSTNAME", ""}}),
              HasSubstr("JOB_NAME=set-workers-2 and JOBSET_NAME=set"));
  EXPECT_THAT(PodIn(kJob + Set{{"PROCESSES_IN_JOB", "2"}}),
              HasSubstr("JOB_COMPLETION_INDEX=2 and PROCESSES_IN_JOB=2"));
  EXPECT_THAT(PodIn({{"JOB_COMPLETION_INDEX", "two"}}),
              HasSubstr("JOB_COMPLETION_INDEX='two': a whole number from 0"));
}

TEST(FindPlace, TakesAPodForNoRankAndRefusesAWorldThatIsTooSmallForIt) {
  EXPECT_TRUE(FindPlace(In(kJob))->empty());
  const Set fits = kJob + Set{{"RANK", "2"}, {"WORLD_SIZE", "4"}};
  EXPECT_EQ(FindPlace(In(fits))->front().rank, 2);
  const Set small = kJob + Set{{"RANK", "1"}, {"WORLD_SIZE", "2"}};
  const std::string why(MessageOf(FindPlace(In(small)).status()));
  EXPECT_THAT(why, HasSubstr("RANK=1 WORLD_SIZE=2 (set by hand) and JOB_COMPLETION_INDEX=2"));
}

}  // namespace
}  // namespace outlast
