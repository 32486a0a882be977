// SPDX-License-Identifier: Apache-2.0
#include "pack/plan_text.h"

#include <algorithm>
#include <limits>
#include <map>
#include <sstream>
#include <utility>
#include <vector>

#include "plan_view.h"

namespace pat {
namespace {

constexpr int32_t kEnd = std::numeric_limits<int32_t>::max();  // of a tail: the sequence's end
constexpr size_t kMaxRuns = 6;

std::string counted(int64_t count, const char* one, const char* several) {
  return std::to_string(count) + " " + (count == 1 ? one : several);
}

// "query 3", "queries 0-15, 20"; of many runs the first ones, and how many numbers there are.
std::string numbers(const char* one, const char* several, std::vector<int32_t> all) {
  std::sort(all.begin(), all.end());
  std::ostringstream text;
  text << (all.size() == 1 ? one : several);
  size_t runs = 0;
  for (size_t i = 0, last; i < all.size(); i = last + 1) {
    for (last = i; last + 1 < all.size() && all[last + 1] == all[last] + 1;) ++last;
    if (runs++ == kMaxRuns) {
      text << ", ... (" << all.size() << " in all)";
      break;
    }
    text << (i == 0 ? " " : ", ") << all[i];
    if (last > i) text << "-" << all[last];
  }
  return text.str();
}

std::string tokens(int32_t start, int32_t end) {
  const std::string to = end == kEnd ? "end of sequence" : std::to_string(end);
  return "tokens [" + std::to_string(start) + ", " + to + ")";
}

int32_t end_of(const Segment& segment) {
  return is_dynamic(segment) ? kEnd : segment.kv_start + segment.kv_len;
}

// Consecutive tokens that one set of queries attends to, in as many items as they were split into.
struct Node {
  std::vector<int32_t> queries;  // ascending
  int32_t start;
  int32_t end;
  std::vector<size_t> children;
};

// The nodes that the items were made of; pieces of a split node are one node again.
std::vector<Node> nodes_of(const PlanView& view) {
  std::map<std::vector<int32_t>, std::vector<std::pair<int32_t, int32_t>>> spans_of;
  for (int32_t i = 0; i < view.header->num_items; ++i) {
    view.for_each_segment(i, [&](const Segment& segment) {
      std::vector<int32_t> queries;
      const Member* members = view.members + view.items[i].member_offset + segment.first_member;
      for (int32_t m = 0; m < segment.num_queries; ++m) queries.push_back(members[m].query);
      std::sort(queries.begin(), queries.end());
      spans_of[queries].emplace_back(segment.kv_start, end_of(segment));
    });
  }
  std::vector<Node> nodes;
  for (auto& [queries, spans] : spans_of) {
    std::sort(spans.begin(), spans.end());
    for (size_t i = 0; i < spans.size(); ++i) {
      if (i > 0 && nodes.back().end == spans[i].first) {
        nodes.back().end = spans[i].second;
      } else {
        nodes.push_back({queries, spans[i].first, spans[i].second, {}});
      }
    }
  }
  std::sort(nodes.begin(), nodes.end(), [](const Node& a, const Node& b) {
    return std::pair(a.queries[0], a.start) < std::pair(b.queries[0], b.start);
  });
  return nodes;
}

// Hangs each node beneath the one that holds its first query's tokens before it; gives the roots.
std::vector<size_t> link(std::vector<Node>& nodes) {
  std::map<std::pair<int32_t, int32_t>, size_t> ends_at;  // by query and end
  for (size_t n = 0; n < nodes.size(); ++n) {
    for (int32_t query : nodes[n].queries) ends_at[{query, nodes[n].end}] = n;
  }
  std::vector<size_t> roots;
  for (size_t n = 0; n < nodes.size(); ++n) {
    const auto above = ends_at.find({nodes[n].queries[0], nodes[n].start});
    (above == ends_at.end() ? roots : nodes[above->second].children).push_back(n);
  }
  return roots;
}

void write_tree(std::ostream& text, const PlanView& view, int max_lines) {
  std::vector<Node> nodes = nodes_of(view);
  int lines = 0;
  const auto write = [&](const auto& self, const std::vector<size_t>& siblings, int depth) -> void {
    for (const size_t n : siblings) {
      if (lines >= max_lines) return;
      ++lines;
      text << std::string(2 * depth, ' ') << tokens(nodes[n].start, nodes[n].end) << " of "
           << numbers("query", "queries", nodes[n].queries) << "\n";
      self(self, nodes[n].children, depth + 1);
    }
  };
  text << "tree:\n";
  write(write, link(nodes), 1);
  const int64_t left = static_cast<int64_t>(nodes.size()) - max_lines;
  if (left > 0) text << "  ... and " << counted(left, "more node", "more nodes") << "\n";
}

void write_item(std::ostream& text, const PlanView& view, int32_t index) {
  const PlanHeader& header = *view.header;
  const Item& item = view.items[index];
  std::vector<int32_t> queries, partials;
  for (int32_t i = 0; i < item.num_queries; ++i) {
    const Member& member = view.members[item.member_offset + i];
    queries.push_back(member.query);
    if (member.partial != kDirect) partials.push_back(member.partial);
  }
  const bool is_wide = index < header.num_wide_items;
  const bool is_heavy = index < header.num_wide_items + header.num_heavy_items;
  text << "  item " << index << ": "
       << (is_branch(item) ? "branch"
           : is_wide       ? "wide"
           : is_heavy      ? "heavy"
                           : "light")
       << "  " << numbers("query", "queries", queries) << "  ";
  const auto [first_segment, num_segments] = view.item_segments[index];
  const int32_t peer = view.peer_of(index);
  if (!is_branch(item)) {
    const Segment& s = view.segments[first_segment];
    text << tokens(s.kv_start, end_of(s)) << " in the row of query " << s.query;
  } else {
    text << counted(num_segments, "segment", "segments");
    if (peer >= 0) {
      text << ", " << counted(item.common_tiles * kBranchAlign, "token", "tokens") << " with item "
           << peer;
    }
  }
  text << "  tile of " << item.row_tile << " rows, to ";
  if (!partials.empty()) text << numbers("partial", "partials", partials);
  if (partials.size() < queries.size()) text << (partials.empty() ? "output" : " and output");
  text << "\n";
}

}  // namespace

std::string plan_line(const Plan& plan) {
  const PlanHeader& header = plan.header();
  std::ostringstream text;
  text << "<Plan: " << counted(header.num_queries, "query", "queries") << ", ";
  if (header.draft_tokens > 1) text << header.draft_tokens << " draft tokens each, ";
  text << header.num_q_heads << " query and " << header.num_kv_heads << " KV heads, "
       << counted(header.num_items, "item", "items") << " (" << header.num_shared_items
       << " shared), " << counted(header.num_partials, "partial result", "partial results");
  if (header.joint) text << ", joint";
  if (!plan.degraded.empty()) text << ", degraded: " << plan.degraded;
  text << ">";
  return text.str();
}

std::string plan_text(const Plan& plan, int max_lines) {
  const PlanView view = view_plan(plan.blob.data(), static_cast<int64_t>(plan.blob.size()));
  const int32_t count = view.header->num_items;
  if (count == 0) return plan_line(plan);
  std::ostringstream text;
  text << plan_line(plan) << "\n";
  write_tree(text, view, max_lines);
  text << "items, in the order in which they begin:\n";
  for (int32_t i = 0; i < std::min(count, max_lines); ++i) write_item(text, view, i);
  const int32_t left = count - max_lines;
  if (left > 0) text << "  ... and " << counted(left, "more item", "more items") << "\n";
  std::string lines = text.str();
  lines.pop_back();  // print() ends the last line
  return lines;
}

}  // namespace pat
