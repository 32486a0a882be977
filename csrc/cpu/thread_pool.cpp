// SPDX-License-Identifier: Apache-2.0
#include "cpu/thread_pool.h"

#include <thread>

namespace pat {

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
    done_.wait(lock, [this] { return active_ == 0; });
  }
}

void ThreadPool::work_forever() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return vacancies_ > 0; });
    const int thread = vacancies_--;
    ++active_;
    lock.unlock();
    call_(context_, thread);
    lock.lock();
    if (--active_ == 0) done_.notify_one();
  }
}

}  // namespace pat
