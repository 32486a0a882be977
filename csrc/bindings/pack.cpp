// SPDX-License-Identifier: Apache-2.0
// Python's view of targets, plans and the planner.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <array>
#include <bit>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"
#include "check.h"
#include "pack/cut.h"
#include "pack/schedule.h"
#include "srt/handles.h"
#include "srt/radix_paths.h"

namespace py = pybind11;
using namespace py::literals;

namespace pat {
namespace {

using Int64Array = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;

// A read-only array of what a plan owns, which keeps the plan alive.
template <typename T>
py::array array_of(const py::object& plan, const T* data, size_t count) {
  py::array view(py::dtype::of<T>(), {count}, {sizeof(T)}, data, plan);
  py::detail::array_proxy(view.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
  return view;
}

// queries: a list or tuple that has, per query, a sequence of (node id, start, end), or None. At C
// speed: at 256 requests a loop in Python would cost more than the whole schedule.
void read_paths(const py::object& queries, Paths& out) {
  out.clear();
  for (py::ssize_t query = 0; query < PySequence_Fast_GET_SIZE(queries.ptr()); ++query) {
    PyObject* info = PySequence_Fast_GET_ITEM(queries.ptr(), query);
    if (info != Py_None) {
      const py::object path = fast_sequence(info, "a path must be a sequence of tuples or None");
      for (py::ssize_t level = 0; level < PySequence_Fast_GET_SIZE(path.ptr()); ++level) {
        PyObject* element = PySequence_Fast_GET_ITEM(path.ptr(), level);
        out.elements.push_back({path_field(element, 0, "node id"), path_field(element, 1, "start"),
                                path_field(element, 2, "end")});
      }
    }
    out.end_query();
  }
}

// The scheduler of one target, with its working memory and the paths of the last plan.
class Planner {
 public:
  explicit Planner(const Target& target) : scheduler_(target) {}

  // infos: per query a sequence of (node id, start, end), or None.
  Plan plan(const py::sequence& infos, const Int64Array& seq_lens) {
    // Counted as it is read: a sequence may say another length than it has.
    const py::object queries = fast_sequence(infos.ptr(), "paths must be a sequence");
    const py::ssize_t count = PySequence_Fast_GET_SIZE(queries.ptr());
    PAT_CHECK(count == seq_lens.size(), "paths of ", count, " queries and ", seq_lens.size(),
              " sequence lengths: need one of each per query");
    read_paths(queries, paths_);
    return scheduler_.schedule(paths_, seq_lens.data());
  }

  // handles: of the requests, as HandleReader gives them; leaf: see RadixPaths.
  Plan plan_from_handles(const py::bytes& handles, const Int64Array& seq_lens, RadixPaths& paths,
                         const py::object& leaf) {
    const std::string_view bytes = handles;
    const auto leaf_of = [&](size_t query, int64_t id) {
      return leaf.is_none() ? py::object() : leaf(query, id);
    };
    paths.read(reinterpret_cast<const Handle*>(bytes.data()), bytes.size() / sizeof(Handle),
               static_cast<size_t>(seq_lens.size()), leaf_of, paths_);
    return scheduler_.schedule(paths_, seq_lens.data());
  }

  // Of each query, what the last plan was made from: (node id, start, end), from the root on.
  std::vector<std::vector<std::tuple<int64_t, int64_t, int64_t>>> last_paths() const {
    std::vector<std::vector<std::tuple<int64_t, int64_t, int64_t>>> found(paths_.num_queries());
    for (size_t query = 0; query < found.size(); ++query) {
      for (int64_t i = paths_.offsets[query]; i < paths_.offsets[query + 1]; ++i) {
        const auto& [id, start, end] = paths_.elements[i];
        found[query].emplace_back(id, start, end);
      }
    }
    return found;
  }

  // What the judge charges: values of kCostNames.
  using CostValues = std::array<double, kCostNames.size()>;
  CostValues costs() const { return std::bit_cast<CostValues>(scheduler_.costs()); }
  void set_costs(const CostValues& values) { scheduler_.set_costs(std::bit_cast<Costs>(values)); }

  // Of the last plan: parent (-1: none), start, end and queries of each node, parents first, and
  // the deepest node of each query.
  py::tuple last_tree() const {
    const PackTree* tree = scheduler_.tree();
    PAT_CHECK(tree != nullptr, "there is no last plan, or it has raised: plan a batch first");
    std::vector<std::tuple<int32_t, int32_t, int32_t, int32_t>> nodes;
    for (const PackNode& node : tree->nodes) {
      nodes.emplace_back(node.parent, node.start, node.end, node.num_queries);
    }
    return py::make_tuple(nodes, tree->query_node);
  }

  // The last plan's batch as the caller wants it, see Scheduler::schedule().
  Plan plan_packs(const Int64Array& seq_lens, const std::vector<uint8_t>& takes_over,
                  const std::vector<int32_t>& piece_tokens) {
    PAT_CHECK(scheduler_.tree() != nullptr && seq_lens.size() == paths_.num_queries(),
              seq_lens.size(), " sequence lengths do not belong to the last plan");
    return scheduler_.schedule(paths_, seq_lens.data(), takes_over, piece_tokens);
  }

  // The paths of the last plan, which must not have thrown, with other lengths.
  Plan plan_again(const Int64Array& seq_lens) {
    PAT_CHECK(seq_lens.size() == paths_.num_queries(), seq_lens.size(),
              " sequence lengths for the paths of ", paths_.num_queries(), " queries");
    return scheduler_.schedule(paths_, seq_lens.data());
  }

 private:
  Scheduler scheduler_;
  Paths paths_;
};

// Sum of lengths that lie within the plan's bounds, else -1. `seq_lens`: int64 host memory.
int64_t total_tokens(const Plan& plan, uintptr_t seq_lens, size_t count) {
  const auto* lens = reinterpret_cast<const int64_t*>(seq_lens);
  if (count != plan.max_seq_lens.size()) return -1;
  bool inside = true;
  int64_t total = 0;
  for (size_t i = 0; i < count; ++i) {
    inside &= lens[i] >= plan.min_seq_lens[i] && lens[i] <= plan.max_seq_lens[i];
    total += lens[i];
  }
  return inside ? total : -1;
}

void bind_target(py::module_& m) {
  py::class_<Target>(m, "Target")
      .def(py::init<>())
      .def_readwrite("num_sms", &Target::num_sms)
      .def_readwrite("num_q_heads", &Target::num_q_heads)
      .def_readwrite("num_kv_heads", &Target::num_kv_heads)
      .def_readwrite("draft_tokens", &Target::draft_tokens)
      .def_readwrite("head_dim", &Target::head_dim)
      .def_readwrite("v_head_dim", &Target::v_head_dim)
      .def_readwrite("token_values", &Target::token_values)
      .def_readwrite("kv_bytes", &Target::kv_bytes)
      .def_readwrite("partial_bytes", &Target::partial_bytes)
      .def_readwrite("bytes_per_s", &Target::bytes_per_s)
      .def_readwrite("flops_per_s", &Target::flops_per_s)
      .def_readwrite("item_overhead_s", &Target::item_overhead_s)
      .def_readwrite("sm_speedup", &Target::sm_speedup)
      .def_readwrite("items_per_sm", &Target::items_per_sm)
      .def_readwrite("reread_weight", &Target::reread_weight)
      .def_readwrite("row_tiles", &Target::row_tiles)
      .def_readwrite("kv_tiles", &Target::kv_tiles)
      .def_readwrite("max_queries", &Target::max_queries)
      .def_readwrite("max_items", &Target::max_items)
      .def_readwrite("max_partials", &Target::max_partials)
      .def_readwrite("max_segments", &Target::max_segments)
      .def_readwrite("max_branch_tokens", &Target::max_branch_tokens)
      .def_readwrite("hopper", &Target::hopper)
      .def_readwrite("cuts", &Target::cuts)
      .def_readwrite("by_paper", &Target::by_paper);
}

using H = PlanHeader;

void bind_plan_counts(py::class_<Plan>& plan) {
  const auto count = [&](const char* name, int32_t H::* field, const char* doc) {
    plan.def_property_readonly(name, [field](const Plan& p) { return p.header().*field; }, doc);
  };
  count("num_queries", &H::num_queries, "Queries of the batch.");
  count("num_items", &H::num_items, "Items.");
  count("num_shared_items", &H::num_shared_items, "Items with tokens that several queries share.");
  count("num_wide_items", &H::num_wide_items,
        "Items of more than 64 packed rows: the first of items.");
  count("num_heavy_items", &H::num_heavy_items,
        "Items of more than 16 packed rows, and branches: those after the wide ones.");
  count("num_paired_items", &H::num_paired_items,
        "Branches that the halves of an SM run two by two: the first of the heavy items.");
  count("joint", &H::joint, "1 if both halves of an SM work on each item, which all are heavy.");
  count("num_segments", &H::num_segments,
        "Segments: those of the branches, then those of the other items.");
  count("branch_tokens", &H::branch_tokens,
        "Tokens that the branches take in the list, which begins with them.");
  count(
      "list_tokens", &H::list_tokens,
      "Tokens of the list: the slots that all items read, with the room that tails may grow into.");
  count("num_members", &H::num_members, "Members of all items.");
  count("num_partials", &H::num_partials, "Partial results that the merge reads.");
  count("num_q_heads", &H::num_q_heads, "Query heads that the plan is for.");
  count("num_kv_heads", &H::num_kv_heads, "KV heads that the plan is for.");
  count("draft_tokens", &H::draft_tokens,
        "Draft tokens of a query: 1 in a plan for a decode step.");
  plan.def_property_readonly(
          "nbytes", [](const Plan& p) { return p.blob.size(); }, "Bytes of the plan's buffer.")
      .def_property_readonly(
          "data_ptr", [](const Plan& p) { return reinterpret_cast<uintptr_t>(p.blob.data()); },
          "Address of the plan's buffer in host memory (csrc/plan.h).")
      .def_readonly(
          "last_token", &Plan::last_token,
          "Where the last tokens end that items read of a sequence, tails at their least.")
      .def_readonly("most_rows", &Plan::most_rows, "The most packed rows of an item.")
      .def_readonly(
          "degraded", &Plan::degraded,
          "Why the plan is simpler than the rules ask for, naming the capacity that was too "
          "small; \"\" if it is not.")
      .def_readonly("seconds", &Plan::seconds,
                    "Seconds that the judge expects of forward and merge, the launch included.");
}

template <typename T>
void bind_array(py::class_<Plan>& plan, const char* name, int32_t H::* offset, int32_t H::* count,
                const char* doc) {
  const auto array = [offset, count](const py::object& self) {
    const auto& p = self.cast<const Plan&>();
    return array_of(self, reinterpret_cast<const T*>(p.blob.data() + p.header().*offset),
                    static_cast<size_t>(p.header().*count));
  };
  plan.def_property_readonly(name, array, doc);
}

// The fields of the arrays' elements are those of csrc/plan.h.
void bind_plan_arrays(py::class_<Plan>& plan) {
  PYBIND11_NUMPY_DTYPE(Item, member_offset, num_queries, list_start, tokens, query, partial,
                       row_tile, unmasked_tiles, common_tiles, kind, order);
  PYBIND11_NUMPY_DTYPE(ItemSegments, first_segment, num_segments);
  PYBIND11_NUMPY_DTYPE(Member, query, partial);
  PYBIND11_NUMPY_DTYPE(QuerySplits, partial_offset, num_splits);
  PYBIND11_NUMPY_DTYPE(Segment, query, kv_start, kv_len, room, first_member, num_queries);
  bind_array<Item>(plan, "items", &H::items_offset, &H::num_items,
                   "[num_items] what an executor runs at once, in this order.");
  bind_array<ItemSegments>(plan, "item_segments", &H::item_segments_offset, &H::num_items,
                           "[num_items] which segments each item reads.");
  bind_array<Member>(plan, "members", &H::members_offset, &H::num_members,
                     "[num_members] the queries of each item and where its results for them go.");
  bind_array<QuerySplits>(plan, "queries", &H::queries_offset, &H::num_queries,
                          "[num_queries] the partial results that the merge joins for each query.");
  bind_array<Segment>(
      plan, "segments", &H::segments_offset, &H::num_segments,
      "[num_segments] tokens that items read, and the queries that attend to them.");
  const auto bound = [&](const char* name, std::vector<int64_t> Plan::* lens, const char* doc) {
    plan.def_property_readonly(
        name,
        [lens](const py::object& self) {
          const auto& bounds = self.cast<const Plan&>().*lens;
          return array_of(self, bounds.data(), bounds.size());
        },
        doc);
  };
  bound("min_seq_lens", &Plan::min_seq_lens,
        "[num_queries] int64: the plan holds for no shorter sequences.");
  bound("max_seq_lens", &Plan::max_seq_lens,
        "[num_queries] int64: the plan holds for no longer sequences.");
}

void bind_plan(py::module_& m) {
  py::class_<Plan> plan(
      m, "Plan",
      "An immutable plan of one decode step, made by plan(). Its arrays are views\n"
      "of one buffer, whose layout and field names are those of csrc/plan.h.");
  bind_plan_counts(plan);
  bind_plan_arrays(plan);
  plan.def(
          "fits",
          [](const Plan& p, uintptr_t lens, size_t count) {
            return total_tokens(p, lens, count) >= 0;
          },
          "seq_lens_ptr"_a, "count"_a,
          "Whether the plan holds for `count` int64 lengths at a host address.")
      .def("total_tokens", &total_tokens, "seq_lens_ptr"_a, "count"_a,
           "Sum of `count` int64 lengths at a host address; -1 if the plan does not hold for them.")
      .def(
          "kv_tokens_read",
          [](const Plan& p, int64_t total_tokens) { return p.fixed_tokens + total_tokens; },
          "total_tokens"_a,
          "K/V tokens that the items read for one layer and KV head, given sum(seq_lens).");
}

void bind_planner(py::module_& m) {
  py::class_<RadixPaths>(m, "RadixPaths",
                         "Keeps the nodes that a batch stands on: see radix_paths.h.")
      .def_static(
          "of_tree_core",
          [](const py::object& core, size_t most_read) {
            return RadixPaths(std::make_unique<TreeCoreNodes>(core), most_read);
          },
          "core"_a, "most_read"_a,
          "Of SGLang's compiled tree core. Raises AttributeError if it lacks a call.")
      .def_static(
          "of_nodes",
          [](const std::string& id, const std::string& parent, const std::string& key,
             size_t most_read) {
            return RadixPaths(std::make_unique<PythonNodes>(id, parent, key), most_read);
          },
          "id"_a, "parent"_a, "key"_a, "most_read"_a,
          "Of Python nodes with attributes of these names.")
      .def_readonly("num_missing", &RadixPaths::num_missing)
      .def_readonly("num_uncached", &RadixPaths::num_uncached)
      .def_readonly("num_unread", &RadixPaths::num_unread)
      .def_readonly("num_too_long", &RadixPaths::num_too_long);
  py::class_<Planner>(m, "Planner")
      .def(py::init<const Target&>(), "target"_a)
      .def("plan", &Planner::plan, "infos"_a, "seq_lens"_a)
      .def("plan_from_handles", &Planner::plan_from_handles, "handles"_a, "seq_lens"_a, "paths"_a,
           "leaf"_a)
      .def("last_paths", &Planner::last_paths)
      .def_property("costs", &Planner::costs, &Planner::set_costs,
                    "What the judge charges: values of COST_NAMES, see target.h.")
      .def("last_tree", &Planner::last_tree)
      .def("plan_packs", &Planner::plan_packs, "seq_lens"_a, "takes_over"_a, "piece_tokens"_a)
      .def("plan_again", &Planner::plan_again, "seq_lens"_a);
}

}  // namespace

void bind_pack(py::module_& m) {
  bind_target(m);
  bind_plan(m);
  bind_planner(m);
  m.attr("LEAST_HEADROOM") = kLeastHeadroom;  // tokens that a query may grow under a new plan
  m.attr("CUDA_TILE_TOKENS") = kBranchAlign;
  py::list cuts;
  for (const Cut& cut : kCuts) cuts.append(cut.name);
  m.attr("CUTS") = py::tuple(cuts);
  m.attr("COST_NAMES") =
      py::tuple(py::cast(std::vector<std::string>(kCostNames.begin(), kCostNames.end())));
  m.def("plan_bytes", &plan_bytes, "items"_a, "members"_a, "queries"_a, "segments"_a,
        "Bytes of a plan of so many items, members, queries and segments (csrc/plan.h).");
  py::class_<HandleReader>(m, "HandleReader", "Reads requests: see handles.h.")
      .def(py::init<const std::array<std::string, 3>&, int64_t, int64_t>(), "paths"_a, "settle"_a,
           "recheck"_a)
      .def("read", &HandleReader::read, "requests"_a, "rows_ptr"_a, "generations_ptr"_a,
           "num_generations"_a, "step"_a, "anew"_a,
           "The handles as bytes, int64 [requests, 3]. Raises AttributeError, and TypeError for "
           "what\n"
           "is no integer.");
}

}  // namespace pat
