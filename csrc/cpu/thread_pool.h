// SPDX-License-Identifier: Apache-2.0
// Threads that sleep between decode calls.
#pragma once

#include <pthread.h>

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace pat {

// Workers are started when a call first wants them and never end. One run() at a time.
class ThreadPool {
 public:
  // Calls work(i) on up to `threads` threads, each with its own i < threads, i = 0 on the calling
  // thread, and returns when all that began have ended. `work` takes its pieces from a shared
  // counter until none are left: a worker that the system wakes too late is not waited for.
  // `work` must not throw.
  void run(int threads, const std::function<void(int)>& work) {
    if (threads > 1) {
      std::lock_guard lock(mutex_);
      for (; workers_ < threads - 1; ++workers_) std::thread([this] { work_forever(); }).detach();
      work_ = &work;
      vacancies_ = threads - 1;
      wake_.notify_all();
    }
    work(0);
    if (threads > 1) {
      std::unique_lock lock(mutex_);
      vacancies_ = 0;
      wait_until(done_, lock, [this] { return active_ == 0; });
    }
  }

 private:
  // What std::condition_variable::wait() does. That one is in libstdc++ under a version of GCC 12,
  // and wheels are to run beside the libstdc++ of GCC 11 too (docs/release.md).
  template <typename Condition>
  static void wait_until(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
                         const Condition& holds) {
    while (!holds()) pthread_cond_wait(changed.native_handle(), lock.mutex()->native_handle());
  }

  void work_forever() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wait_until(wake_, lock, [this] { return vacancies_ > 0; });
      const int thread = vacancies_--;
      ++active_;
      lock.unlock();
      (*work_)(thread);
      lock.lock();
      if (--active_ == 0) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  // All guarded by mutex_.
  int workers_ = 0;
  int vacancies_ = 0;  // how often a worker may still enter the run
  int active_ = 0;     // workers inside it
  const std::function<void(int)>* work_ = nullptr;
};

}  // namespace pat
