// SPDX-License-Identifier: Apache-2.0
#include "pack/plan_text.h"

#include <algorithm>
#include <array>
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

std::string counted(int64_t count, const char* what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

// "query 3", "queries 0-15, 20"; of many runs the first ones, and how many numbers there are.
std::string numbers(const char* one, const char* several, const std::vector<int32_t>& sorted) {
  std::ostringstream text;
  text << (sorted.size() == 1 ? one : several);
  size_t runs = 0;
  for (size_t i = 0; i < sorted.size();) {
    size_t last = i;
    while (last + 1 < sorted.size() && sorted[last + 1] == sorted[last] + 1) ++last;
    if (runs++ == kMaxRuns) {
      text << ", ... (" << sorted.size() << " in all)";
      break;
    }
    text << (i == 0 ? " " : ", ") << sorted[i];
    if (last > i) text << "-" << sorted[last];
    i = last + 1;
  }
  return text.str();
}

std::string tokens(int32_t start, int32_t end) {
  const std::string to = end == kEnd ? "end of sequence" : std::to_string(end);
  return "tokens [" + std::to_string(start) + ", " + to + ")";
}

// Consecutive tokens that one set of queries attends to, in as many items as they were split into.
struct Node {
  std::vector<int32_t> queries;  // ascending
  int32_t start;
  int32_t end;
  std::vector<size_t> children;
};

struct Range {
  std::vector<int32_t> queries;
  int32_t start;
  int32_t end;
};

Range range_of(const PlanView& view, const Item& item, const Segment& segment) {
  Range range{{}, segment.kv_start, is_dynamic(segment) ? kEnd : segment.kv_start + segment.kv_len};
  const Member* members = view.members + item.member_offset + segment.first_member;
  for (int32_t i = 0; i < segment.num_queries; ++i) range.queries.push_back(members[i].query);
  std::sort(range.queries.begin(), range.queries.end());
  return range;
}

// The nodes that the items were made of; pieces of a split node are one node again.
std::vector<Node> nodes_of(const PlanView& view) {
  std::map<std::vector<int32_t>, std::vector<std::pair<int32_t, int32_t>>> ranges;
  for (int32_t i = 0; i < view.header->num_items; ++i) {
    view.for_each_segment(i, [&](const Segment& segment) {
      const Range range = range_of(view, view.items[i], segment);
      ranges[range.queries].emplace_back(range.start, range.end);
    });
  }
  std::vector<Node> nodes;
  for (auto& [queries, spans] : ranges) {
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
  std::vector<std::pair<size_t, int>> open;  // node and depth, next one last
  const auto push = [&open](const std::vector<size_t>& siblings, int depth) {
    for (auto n = siblings.rbegin(); n != siblings.rend(); ++n) open.emplace_back(*n, depth);
  };
  push(link(nodes), 1);
  text << "tree:\n";
  for (int line = 0; line < max_lines && !open.empty(); ++line) {
    const auto [n, depth] = open.back();
    open.pop_back();
    const Node& node = nodes[n];
    text << std::string(2 * depth, ' ') << tokens(node.start, node.end) << " of "
         << numbers("query", "queries", node.queries) << "\n";
    push(node.children, depth + 1);
  }
  const int64_t left = static_cast<int64_t>(nodes.size()) - max_lines;
  if (left > 0) text << "  ... and " << counted(left, "more node") << "\n";
}

using Cells = std::array<std::string, 5>;

Cells cells_of(const PlanView& view, int32_t index) {
  const PlanHeader& header = *view.header;
  const Item& item = view.items[index];
  std::vector<int32_t> queries, partials;
  for (int32_t i = 0; i < item.num_queries; ++i) {
    const Member& member = view.members[item.member_offset + i];
    queries.push_back(member.query);
    if (member.partial != kDirect) partials.push_back(member.partial);
  }
  std::sort(queries.begin(), queries.end());
  std::sort(partials.begin(), partials.end());
  const auto [first_segment, num_segments] = view.item_segments[index];
  std::string read;
  if (is_branch(item)) {
    read = counted(num_segments, "segment");
    if (const int32_t peer = view.peer_of(index); peer >= 0) {
      read += ", " + counted(item.common_tiles * kBranchAlign, "token") + " with item " +
              std::to_string(peer);
    }
  } else {
    const Segment& s = view.segments[first_segment];
    const int32_t end = is_dynamic(s) ? kEnd : s.kv_start + s.kv_len;
    read = tokens(s.kv_start, end) + " in the row of query " + std::to_string(s.query);
  }
  std::string to = partials.empty() ? "" : numbers("partial", "partials", partials);
  if (partials.size() < queries.size()) to += to.empty() ? "output" : " and output";
  const bool is_heavy = index < header.num_wide_items + header.num_heavy_items;
  const char* kind = index < header.num_wide_items ? "wide" : is_heavy ? "heavy" : "light";
  return {"item " + std::to_string(index) + ":", is_branch(item) ? "branch" : kind,
          numbers("query", "queries", queries), read,
          "tile of " + std::to_string(item.row_tile) + " rows, to " + to};
}

void write_items(std::ostream& text, const PlanView& view, int max_lines) {
  const int32_t count = view.header->num_items;
  std::vector<Cells> rows;
  for (int32_t i = 0; i < std::min<int32_t>(count, max_lines); ++i) {
    rows.push_back(cells_of(view, i));
  }
  Cells empty;
  std::array<size_t, empty.size()> widths{};
  for (const Cells& row : rows) {
    for (size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  text << "items, in the order in which they begin:\n";
  for (Cells& row : rows) {
    text << " ";
    for (size_t c = 0; c + 1 < row.size(); ++c) {
      row[c].resize(widths[c], ' ');
      text << " " << row[c] << (c ? " " : "");
    }
    text << " " << row.back() << "\n";
  }
  if (count > max_lines) text << "  ... and " << counted(count - max_lines, "more item") << "\n";
}

}  // namespace

std::string plan_line(const Plan& plan) {
  const PlanHeader& header = plan.header();
  std::ostringstream text;
  text << "<Plan: "
       << (header.num_queries == 1 ? "1 query" : std::to_string(header.num_queries) + " queries")
       << ", ";
  if (header.draft_tokens > 1) text << header.draft_tokens << " draft tokens each, ";
  text << header.num_q_heads << " query and " << header.num_kv_heads << " KV heads, "
       << counted(header.num_items, "item") << " (" << header.num_shared_items << " shared), "
       << counted(header.num_partials, "partial result");
  if (header.joint) text << ", joint";
  if (!plan.degraded.empty()) text << ", degraded: " << plan.degraded;
  text << ">";
  return text.str();
}

std::string plan_text(const Plan& plan, int max_lines) {
  const PlanView view = view_plan(plan.blob.data(), static_cast<int64_t>(plan.blob.size()));
  if (view.header->num_items == 0) return plan_line(plan);
  std::ostringstream text;
  text << plan_line(plan) << "\n";
  write_tree(text, view, max_lines);
  write_items(text, view, max_lines);
  std::string lines = text.str();
  lines.pop_back();  // print() ends the last line
  return lines;
}

}  // namespace pat
