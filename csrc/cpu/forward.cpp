// SPDX-License-Identifier: Apache-2.0
#include "cpu/forward.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#include "check.h"

namespace pat {
namespace {

constexpr int kMaxHeadDim = 576;
constexpr int kMaxHeads = 4096;

void check_head_dim(const char* name, int dim) {
  PAT_CHECK(dim >= 8 && dim <= kMaxHeadDim && dim % 8 == 0, name, " is ", dim,
            ", must be a multiple of 8 up to ", kMaxHeadDim);
}

// What sglang_pat/ops.py leaves: it has looked at pointers, dtypes, shapes and K/V scales.
void check_args(const DecodeArgs& args) {
  PAT_CHECK(
      args.num_kv_heads > 0 && args.num_q_heads > 0 && args.num_q_heads % args.num_kv_heads == 0,
      args.num_q_heads, " query heads do not divide into ", args.num_kv_heads, " KV heads");
  PAT_CHECK(args.num_q_heads <= kMaxHeads, args.num_q_heads, " query heads, at most ", kMaxHeads);
  check_head_dim("head_dim", args.head_dim);
  check_head_dim("v_head_dim", args.v_head_dim);
  PAT_CHECK(std::isfinite(args.scale), "scale is ", args.scale, ", must be finite");
  PAT_CHECK(args.logit_cap >= 0.0f && std::isfinite(args.logit_cap), "logit_cap is ",
            args.logit_cap, ", must be finite and 0 (off) or more");
  for (int i = 0; i < args.num_queries; ++i) {
    PAT_CHECK(args.rows[i] >= 0 && args.rows[i] < args.table_rows, "query ", i, ": row ",
              args.rows[i], " is outside of req_to_token with ", args.table_rows, " rows");
    PAT_CHECK(args.seq_lens[i] >= 0 && args.seq_lens[i] <= args.table_width, "query ", i,
              ": length ", args.seq_lens[i], " is outside of req_to_token with ", args.table_width,
              " tokens a row");
  }
}

// Checks that the items, whose parts are sound, give each query all of its tokens. Of draft tokens
// only the first may stand before a dynamic segment: all of the query's attend to it.
void check_tokens(const PlanView& plan, const DecodeArgs& args) {
  std::vector<int64_t> seen(args.num_queries);  // tokens that the items have given
  const int64_t masked = args.draft_tokens - 1;
  for (int i = 0; i < plan.header->num_items; ++i) {
    plan.for_each_segment(i, [&](const Segment& s) {
      const int64_t length = args.seq_lens[s.query];
      const int64_t tokens = is_dynamic(s) ? length - s.kv_start : s.kv_len;
      PAT_CHECK(is_dynamic(s) ? tokens >= masked : s.kv_start + tokens <= length - masked, "item ",
                i, " reads tokens ", s.kv_start, " + ", s.kv_len, " of query ", s.query,
                ", whose length is ", length, ": the plan was made for other lengths");
      PAT_CHECK(tokens <= s.room, "item ", i, " has room for ", s.room, " tokens of query ",
                s.query, ", which has ", tokens, " from ", s.kv_start,
                " on: the plan was made for other lengths");
      const Member* members = plan.members + plan.items[i].member_offset + s.first_member;
      for (int m = 0; m < s.num_queries; ++m) seen[members[m].query] += tokens;
    });
  }
  for (int q = 0; q < args.num_queries; ++q) {
    PAT_CHECK(seen[q] == args.seq_lens[q], "the plan covers ", seen[q], " tokens of query ", q,
              ", whose length is ", args.seq_lens[q],
              ": it was made for other lengths, make a new one");
  }
}

// Reads all of a plan and checks that it is sound and was made for the arguments. Returns the most
// packed rows of an item.
int64_t check_plan(const PlanView& plan, const DecodeArgs& args) {
  check_heads(*plan.header, "the arguments have", args.num_q_heads, args.num_kv_heads,
              args.draft_tokens);
  PAT_CHECK(plan.header->num_queries == args.num_queries, "the plan is for ",
            plan.header->num_queries, " queries, the arguments have ", args.num_queries);
  const PlanReach reach = check_parts(plan);
  check_tokens(plan, args);
  return reach.most_rows;
}

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
    check_args(args);
    const PlanView plan = view_plan(blob, blob_bytes);
    const int64_t most_rows = check_plan(plan, args);
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
    const int threads = num_threads(args, work_units);
    const int64_t lines = (scratch_floats(args, most_rows) + 15) / 16;
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
  static int num_threads(const DecodeArgs& args, int64_t work_units) {
    constexpr int64_t kMultiplyAddsPerThread = 250'000;
    const int64_t tokens =
        std::accumulate(args.seq_lens, args.seq_lens + args.num_queries, int64_t{0});
    const int64_t work =
        tokens * args.draft_tokens * args.num_q_heads * (args.head_dim + args.v_head_dim);
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
        char* out = static_cast<char*>(args.out.data) +
                    (row * args.out.stride_row + head * args.out.stride_head) * bytes;
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
