// SPDX-License-Identifier: Apache-2.0
#include "radix_paths.h"

#include <algorithm>
#include <utility>

#include "../check.h"
#include "../plan.h"

namespace py = pybind11;

namespace pat {

RadixPaths::RadixPaths(std::unique_ptr<NodeSource> source, size_t most_read)
    : source_(std::move(source)), most_read_(most_read) {
  forget();
}

void RadixPaths::forget() {
  nodes_.clear();
  free_.clear();
  table_.clear();
  leaves_.clear();
  nodes_.emplace_back();
  nodes_[kRoot].end = 0;
}

void RadixPaths::read(const Handle* handles, size_t count, size_t num_queries, const Leaf& leaf,
                      Paths& out) {
  PAT_CHECK(num_queries >= count, count, " requests in a batch of ", num_queries, " rows");
  try {
    try_read(handles, count, leaf);
  } catch (...) {
    forget();
    throw;
  }
  out.clear();
  for (size_t query = 0; query < count; ++query) {
    if (query_leaf_[query] != kNoNode) write(query_leaf_[query], handles[query][1], out);
    out.end_query();
  }
  for (size_t query = count; query < num_queries; ++query) out.end_query();
}

// Brings the tree up to date for a batch.
void RadixPaths::try_read(const Handle* handles, size_t count, const Leaf& leaf) {
  ++read_;
  num_missing = num_uncached = num_unread = num_too_long = 0;
  num_read_ = 0;
  named_.clear();
  parents_of_new_.clear();
  query_leaf_.assign(count, kNoNode);
  std::vector<size_t> unknown;
  for (size_t query = 0; query < count; ++query) {
    const auto [id, tokens, row] = handles[query];
    if (id < 0) {
      ++num_missing;
    } else if (tokens <= 0) {
      ++num_uncached;
    } else if (const int32_t index = table_.find(id); index != kNoNode) {
      name(query, index);
    } else {
      unknown.push_back(query);
    }
  }
  // Nodes of requests that have left may be gone, so they are forgotten before the tree is read.
  count_leaves();
  const std::vector<int64_t> too_long = std::exchange(too_long_, {});
  for (const size_t query : unknown) {
    const int64_t id = handles[query][0];
    int32_t index = table_.find(id);
    if (index == kNoNode && std::find(too_long.begin(), too_long.end(), id) == too_long.end()) {
      if (num_read_ >= most_read_) {
        ++num_unread;
        continue;
      }
      index = add(id, leaf(query, id));
      if (!climb(index, most_read_)) index = kNoNode;
    }
    if (index == kNoNode) {
      ++num_too_long;
      too_long_.push_back(id);
    } else {
      name(query, index);
    }
  }
  count_leaves();
  find_split();
}

// A query of this read stands on a node.
void RadixPaths::name(size_t query, int32_t index) {
  Node& node = at(index);
  if (node.named_read != read_) {
    node.named_read = read_;
    node.named = 0;
    named_.push_back(index);
  }
  ++node.named;
  query_leaf_[query] = index;
}

// Counts the queries on the nodes that this read has named so far, and releases the leaves that it
// has not named. Those that gain come first: what stays is not freed in between.
void RadixPaths::count_leaves() {
  for (const int32_t index : named_) {
    Node& node = at(index);
    if (node.named <= node.ends) continue;
    if (node.ends == 0) leaves_.push_back(index);
    add_count(index, node.named - std::exchange(node.ends, node.named));
  }
  size_t kept = 0;
  for (size_t i = 0; i < leaves_.size(); ++i) {
    const int32_t index = leaves_[i];
    const int32_t wanted = at(index).named_read == read_ ? at(index).named : 0;
    if (wanted > 0) leaves_[kept++] = index;
    if (wanted < at(index).ends) release(index, at(index).ends - wanted);
  }
  leaves_.resize(kept);
}

int32_t RadixPaths::add(int64_t id, py::object object) {
  int32_t index = count_of(nodes_);
  if (free_.empty()) {
    nodes_.emplace_back();
  } else {
    index = free_.back();
    free_.pop_back();
    at(index) = Node{};
  }
  at(index).id = id;
  at(index).object = std::move(object);
  at(index).born_read = read_;
  table_.find_or_add(id, index);
  return index;
}

void RadixPaths::add_count(int32_t index, int32_t delta) {
  for (; index >= 0; index = at(index).parent) at(index).count += delta;
}

// Takes queries off a leaf and frees the nodes that no query stands on any more.
void RadixPaths::release(int32_t leaf, int32_t queries) {
  at(leaf).ends -= queries;
  for (int32_t index = leaf, parent; index >= 0; index = parent) {
    Node& node = at(index);
    parent = node.parent;
    node.count -= queries;
    if (node.count > 0 || index == kRoot) continue;
    detach(index);
    drop(index);
  }
}

void RadixPaths::drop(int32_t index) {
  table_.erase(at(index).id);
  at(index).object = py::object();
  free_.push_back(index);
}

// Reads what stands above a node, up to one that is known, and puts each below its parent. Forgets
// the node and returns false if that takes more than `most` nodes.
bool RadixPaths::climb(int32_t index, size_t most) {
  climbed_.clear();
  size_t read = 0;
  int32_t parent = kNoNode;
  while (parent == kNoNode) {
    NodeAbove above = source_->above({at(index).id, at(index).object.ptr()});
    at(index).length = static_cast<int32_t>(above.length);
    climbed_.push_back(index);
    read += above.num_read;
    parent = above.root ? kRoot : table_.find(above.parent);
    if (parent == kNoNode && read >= most) break;
    if (parent == kNoNode) index = add(above.parent, std::move(above.object));
  }
  num_read_ += read;
  if (parent == kNoNode) {
    for (const int32_t dropped : climbed_) drop(dropped);
    return false;
  }
  PAT_CHECK(at(parent).end != kUnknown, "node ", at(parent).id,
            " is among its own ancestors: the nodes are no tree");
  if (at(parent).born_read != read_) parents_of_new_.push_back(parent);
  for (size_t i = climbed_.size(); i-- > 0; parent = climbed_[i]) {
    link(climbed_[i], parent);
    at(climbed_[i]).end = at(parent).end + at(climbed_[i]).length;
  }
  return true;
}

// Puts a node, and what stands below it, under a parent.
void RadixPaths::link(int32_t index, int32_t parent) {
  Node& node = at(index);
  for (int32_t above = parent; node.count > 0 && above >= 0; above = at(above).parent) {
    PAT_CHECK(above != index, "node ", node.id,
              " is among its own ancestors: the nodes are no tree");
    at(above).count += node.count;
  }
  node.parent = parent;
  node.previous = kNoNode;
  node.next = at(parent).child;
  if (node.next != kNoNode) at(node.next).previous = index;
  at(parent).child = index;
}

// Takes a node out of its parent's list of children.
void RadixPaths::detach(int32_t index) {
  const Node& node = at(index);
  if (node.previous != kNoNode) at(node.previous).next = node.next;
  if (node.next != kNoNode) at(node.next).previous = node.previous;
  if (at(node.parent).child == index) at(node.parent).child = node.next;
}

// Under known parents that have got a new child: finds the child that was split for it, if any, and
// puts it under the new node.
void RadixPaths::find_split() {
  std::sort(parents_of_new_.begin(), parents_of_new_.end());
  parents_of_new_.erase(std::unique(parents_of_new_.begin(), parents_of_new_.end()),
                        parents_of_new_.end());
  std::vector<KnownNode> known;
  std::vector<int32_t> indices;
  for (const int32_t parent : parents_of_new_) {
    for (int32_t child = at(parent).child; child != kNoNode; child = at(child).next) {
      const Node& node = at(child);
      if (node.born_read == read_) continue;
      known.push_back({{node.id, node.object.ptr()}, node.length, at(parent).object.ptr()});
      indices.push_back(child);
    }
  }
  if (known.empty()) return;
  for (const size_t i : source_->find_split(known)) {
    Node& node = at(indices[i]);
    add_count(node.parent, -node.count);
    detach(indices[i]);
    node.end = kUnknown;
    climb(indices[i], SIZE_MAX);
  }
}

// The lowest node on a leaf's path on which several queries stand, or kRoot.
int32_t RadixPaths::lowest_shared(int32_t leaf) {
  int32_t index = leaf;
  if (at(leaf).count > 1) return leaf;
  // Counts grow upwards, so that with `top` all below it have one query still.
  if (const int32_t top = at(leaf).top; top != kNoNode && at(top).count == 1) index = top;
  while (at(index).parent != kRoot && at(at(index).parent).count == 1) index = at(index).parent;
  at(leaf).top = index;
  return at(index).parent;
}

// The highest node with the same queries as a node.
int32_t RadixPaths::chain_top(int32_t index) {
  Node& lowest = at(index);
  if (lowest.chain_read != read_) {
    int32_t top = index;
    while (at(top).parent != kRoot && at(at(top).parent).count == lowest.count) {
      top = at(top).parent;
    }
    lowest.chain_read = read_;
    lowest.chain_top = top;
  }
  return lowest.chain_top;
}

// Writes a query's path, from the root on, as far as it is shared and below `limit` tokens.
void RadixPaths::write(int32_t leaf, int64_t limit, Paths& out) {
  path_.clear();
  for (int32_t index = lowest_shared(leaf); index != kRoot;) {
    const int32_t above = at(chain_top(index)).parent;
    const int64_t start = at(above).end;
    const int64_t end = std::min<int64_t>(at(index).end, limit);
    if (start < end) path_.push_back({at(index).id, start, end});
    index = above;
  }
  out.elements.insert(out.elements.end(), path_.rbegin(), path_.rend());
}

}  // namespace pat
