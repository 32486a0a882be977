// SPDX-License-Identifier: Apache-2.0
// Threads that sleep between decode calls.
#pragma once

#include <condition_variable>
#include <mutex>
#include <type_traits>

namespace pat {

// Workers are started when a call first wants them and never end. One run() at a time.
class ThreadPool {
 public:
  ThreadPool() = default;
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Calls work(i) on up to `threads` threads, each with its own i < threads, i = 0 on the calling
  // thread, and returns when all that began have ended. `work` takes its pieces from a shared
  // counter until none are left: a worker that the system wakes too late is not waited for.
  // `work` must not throw.
  template <typename Work>
  void run(int threads, Work& work) {
    static_assert(std::is_nothrow_invocable_v<Work&, int>);
    run(threads, [](void* context, int thread) { (*static_cast<Work*>(context))(thread); }, &work);
  }

 private:
  using Call = void (*)(void* context, int thread);

  void run(int threads, Call call, void* context);
  void work_forever();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  // All guarded by mutex_.
  int workers_ = 0;
  int vacancies_ = 0;  // how often a worker may still enter the run
  int active_ = 0;     // workers inside it
  Call call_ = nullptr;
  void* context_ = nullptr;
};

}  // namespace pat
