// SPDX-License-Identifier: Apache-2.0
#include "cpu/forward.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "check.h"
#include "cpu/attend.h"

namespace pat {
namespace {

// So that no two threads' memory shares a cache line.
struct alignas(64) Line {
  float floats[16];
};

// Memory for so many floats, in whole lines.
std::unique_ptr<Line[]> memory_of(size_t floats) {
  return std::make_unique_for_overwrite<Line[]>((floats + 15) / 16);
}

// Threads that sleep between decode calls: started when a call first wants them, they never end.
// One run() at a time.
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

class Executor {
 public:
  void decode(const void* blob, int64_t blob_bytes, const DecodeArgs& args) {
    std::lock_guard lock(mutex_);
    const CheckedPlan plan = check_plan(blob, blob_bytes, args);
    const size_t partial_rows =
        size_t(plan.header->num_partials) * args.draft_tokens * args.num_q_heads;
    const auto partials = memory_of(partial_rows * args.v_head_dim);  // of fp32, or smaller
    const auto partial_lse = memory_of(partial_rows);
    const DecodeJob job{.args = args,
                        .plan = plan,
                        .head_group = args.num_q_heads / args.num_kv_heads,
                        .group = group_of(*plan.header),
                        .partials = partials.get(),
                        .partial_lse = reinterpret_cast<float*>(partial_lse.get())};
    // Partials to come, per query and KV head.
    std::vector<std::atomic<int32_t>> pending(size_t(args.num_queries) * args.num_kv_heads);
    for (size_t i = 0; i < pending.size(); ++i) {
      pending[i] = plan.queries[i / args.num_kv_heads].num_splits;
    }
    write_empty_queries(job);

    const int64_t work_units = int64_t{plan.header->num_items} * args.num_kv_heads;
    const int threads = num_threads(args, plan, work_units);
    const int64_t lines =
        (scratch_floats(args, int64_t{plan.max_item_queries} * job.group) + 15) / 16;
    const auto scratch = memory_of(threads * lines * 16);
    std::atomic<int64_t> next{0};
    std::atomic<int> failed{-1};
    const auto work = [&](int thread) noexcept {
      auto* own = reinterpret_cast<float*>(scratch.get() + thread * lines);
      for (int64_t unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < work_units;) {
        const int item = static_cast<int>(unit / args.num_kv_heads);
        const int kv_head = static_cast<int>(unit % args.num_kv_heads);
        if (run_item(job, item, kv_head, own)) {
          merge_completed(job, pending, item, kv_head, own);
        } else {
          failed.store(item, std::memory_order_relaxed);
        }
      }
    };
    pool_.run(threads, work);
    const int item = failed.load();
    PAT_CHECK(item < 0, "item ", item, " names a slot outside of the K/V cache of ", args.num_slots,
              " slots, in row ", args.rows[plan.members[plan.items[item].member_offset].query],
              " of req_to_token", plan.items[item].num_queries > 1 ? " or one that shares it" : "");
  }

 private:
  // Waking a thread costs some microseconds, so each gets arithmetic that takes at least as long.
  static int num_threads(const DecodeArgs& args, const CheckedPlan& plan, int64_t work_units) {
    constexpr int64_t kMultiplyAddsPerThread = 250'000;
    const int64_t work = plan.query_tokens * args.draft_tokens * args.num_q_heads *
                         (args.head_dim + args.v_head_dim);
    const int64_t useful = std::min<int64_t>(work_units, 1 + work / kMultiplyAddsPerThread);
    return static_cast<int>(std::clamp<int64_t>(useful, 1, args.num_threads));
  }

  // The thread that completes a query's partials merges them, always in order of position: there
  // is no barrier, and the result does not depend on who comes last.
  static void merge_completed(const DecodeJob& job, std::vector<std::atomic<int32_t>>& pending,
                              int item, int kv_head, float* scratch) {
    const Member* members = job.plan.members + job.plan.items[item].member_offset;
    for (int m = 0; m < job.plan.items[item].num_queries; ++m) {
      if (members[m].partial == kDirect) continue;
      const int query = members[m].query;
      auto& left = pending[size_t(query) * job.args.num_kv_heads + kv_head];
      if (left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        merge_query(job, query, kv_head, scratch);
      }
    }
  }

  static void write_empty_queries(const DecodeJob& job) {
    const DecodeArgs& args = job.args;
    const int bytes = args.dtype == DType::kF32 ? 4 : 2;
    for (int64_t row = 0; row < int64_t{args.num_queries} * args.draft_tokens; ++row) {
      if (job.plan.queries[row / args.draft_tokens].num_splits > 0) continue;
      for (int head = 0; head < args.num_q_heads; ++head) {
        char* out = static_cast<char*>(args.out) +
                    (row * args.out_stride_row + head * args.out_stride_head) * bytes;
        std::memset(out, 0, size_t(args.v_head_dim) * bytes);
        if (args.lse) {
          args.lse[row * args.num_q_heads + head] = lse(complete(args, head, empty_state()));
        }
      }
    }
  }

  std::mutex mutex_;
  ThreadPool pool_;
};

// The process's executor is never destroyed: its threads may sleep in it while the process ends. A
// fork inherits the memory but not the threads, so that a child makes its own.
std::atomic<Executor*> current_executor{nullptr};

Executor& executor() {
  static std::mutex mutex;
  if (Executor* made = current_executor.load(std::memory_order_acquire)) return *made;
  std::lock_guard lock(mutex);
  if (Executor* made = current_executor.load(std::memory_order_acquire)) return *made;
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { current_executor.store(nullptr); });
  (void)registered;
  current_executor.store(new Executor, std::memory_order_release);
  return *current_executor.load(std::memory_order_acquire);
}

}  // namespace

void decode_cpu(const void* plan, int64_t plan_bytes, const DecodeArgs& args) {
  executor().decode(plan, plan_bytes, args);
}

}  // namespace pat
