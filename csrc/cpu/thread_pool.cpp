// SPDX-License-Identifier: Apache-2.0
#include "cpu/thread_pool.h"

#include <pthread.h>

#include <thread>

namespace pat {
namespace {

// What std::condition_variable::wait() does. That one is in libstdc++ under a version of GCC 12,
// and wheels are to run beside the libstdc++ of GCC 11 too (docs/release.md).
template <typename Condition>
void wait_until(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
                const Condition& holds) {
  while (!holds()) pthread_cond_wait(changed.native_handle(), lock.mutex()->native_handle());
}

}  // namespace

void ThreadPool::run(int threads, Call call, void* context) {
  if (threads > 1) {
    std::lock_guard lock(mutex_);
    for (; workers_ < threads - 1; ++workers_) std::thread([this] { work_forever(); }).detach();
    call_ = call;
    context_ = context;
    vacancies_ = threads - 1;
    wake_.notify_all();
  }
  call(context, 0);
  if (threads > 1) {
    std::unique_lock lock(mutex_);
    vacancies_ = 0;
    wait_until(done_, lock, [this] { return active_ == 0; });
  }
}

void ThreadPool::work_forever() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wait_until(wake_, lock, [this] { return vacancies_ > 0; });
    const int thread = vacancies_--;
    ++active_;
    lock.unlock();
    call_(context_, thread);
    lock.lock();
    if (--active_ == 0) done_.notify_one();
  }
}

}  // namespace pat
