// A trainer with a slow start as its own warm template: `outlast run --template CMD` starts CMD
// once beside the job, and a rank that died is filled by a fork of it, which begins where the slow
// start ends.
//
//   int main(int argc, char** argv) {
//     LoadTokenizer();  // slow; no thread is left running, no CUDA, no Run::Join
//     outlast::Template::ServeIfAsked(argc, argv);
//     ...               // all ranks, forked or started, go on here
//   }
//   $ outlast run -n 4 --template ./trainer -- ./trainer --steps 1000
#pragma once

namespace outlast {

class Template {
 public:
  // In a process that was started as a template it serves forks until the job ends, and never
  // returns; it returns in each process that it forks, with the arguments of the job's command in
  // `argc` and `argv`: true. In all other processes it does nothing: false.
  // A fork has all memory as it is here: seed random generators after the call, not before it.
  // A fork is refused, and the rank gets a fresh process, while this process has a second thread or
  // holds an NVIDIA device open.
  static bool ServeIfAsked(int& argc, char**& argv);
};

}  // namespace outlast
