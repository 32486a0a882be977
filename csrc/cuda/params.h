// SPDX-License-Identifier: Apache-2.0
// Decode attention of a plan on a CUDA device, snapshot of the slots, forward and merge: what a
// caller gives, and what the forward kernel gets of it.
#pragma once

#include <cstdint>
#include <string>

#include "dtypes.h"
#include "plan.h"

namespace pat {

struct FirstUnit;  // cuda/forward/pipeline.cuh

inline constexpr int kv_bytes(KVDType type) { return type == KVDType::kE4M3 ? 1 : 2; }

// For divisions in the kernels: value / divisor == value * magic >> 32 for values below
// 2^32 / divisor, and 0 stands for a divisor of 1.
constexpr uint32_t divisor_magic(uint32_t divisor) {
  return divisor == 1 ? 0 : static_cast<uint32_t>(((uint64_t{1} << 32) + divisor - 1) / divisor);
}

// Attention sinks: a logit of each query head, see with_sink(). The dtype is not q's, because
// SGLang has them in bf16 or fp32.
struct Sinks {
  const void* values;  // [heads], or null: none
  DType type;
  int32_t heads;
  uint32_t heads_magic;  // divisor_magic(heads)
};

// How the forward is launched: one persistent kernel for all row tiles (kQueue, the default), or,
// as in the paper, one kernel per row tile, each on a stream of its own (kStreams).
enum class Launch : int { kQueue = 0, kStreams = 1 };

// A row mask says which packed rows of a branch attend to a token: first | count << kRowCountShift.
inline constexpr int kRowCountShift = 8;

// The device memory of a workspace and the heads that it is for: the same over all layers and
// steps.
struct Buffers {
  PlanHeader* plan;     // 16-byte aligned; the snapshot writes Item::tokens and the list
  uint16_t* row_masks;  // [max_branch_tokens], 16-byte aligned: see kRowCountShift
  // [num_rows, draft_tokens], or null where each draft token attends to those before it. Bit j: the
  // draft token attends to draft token j of its query.
  const uint64_t* draft_masks;
  char* partials;          // [max_partials, draft_tokens, num_q_heads, v_head_dim] of float or,
                           // partial_bytes == 2, of q's type
  float* partial_lse;      // [max_partials, draft_tokens, num_q_heads] base 2
  int32_t* queue;          // kQueueInts zeros; the kernels leave zeros
  FirstUnit* first_units;  // [kMostCtas, 2]: what each half of each CTA begins with
  int32_t partial_bytes;   // 4 or 2
  int32_t num_q_heads, num_kv_heads, head_dim;
  int32_t draft_tokens;  // of a query (plan.h), 1 in a decode step
  Launch launch;
  int32_t v_head_dim;  // head_dim, or 512 of 576: MLA, where V is the first columns of K
};

// What a layer's decode works on: filled by the caller. Each kernel gets what it reads of it. All
// strides are in bytes. Tensors are of `type`, bf16 or fp16, K and V of `kv_type`, and their last
// dimension is contiguous.
struct DecodeParams : Buffers {
  const char* q;  // [num_rows * draft_tokens, num_q_heads, head_dim]; of MLA v_head_dim columns
  int64_t q_stride_row, q_stride_head;
  const char* k;  // [slots, num_kv_heads, head_dim]
  int64_t k_stride_slot, k_stride_head;
  const char* v;  // as k
  int64_t v_stride_slot, v_stride_head;
  char* out;  // [num_rows * draft_tokens, num_q_heads, v_head_dim]
  int64_t out_stride_row, out_stride_head;
  float* lse;  // [num_rows * draft_tokens, num_q_heads] base 2, or null
  Sinks sinks;
  int32_t num_rows;  // of the batch, with those that pad it; rows without a query get zeros
  DType type;
  float scale;
  float logit_cap;  // 0: none; else logits are cap * tanh(logit / cap)
  KVDType kv_type;
  float k_scale, v_scale;  // 1 unless kE4M3
  // Of MLA, else null: [num_rows * draft_tokens, num_q_heads, head_dim - v_head_dim], the last
  // columns of q. `v` is `k` then.
  const char* q_rope;
  int64_t q_rope_stride_row, q_rope_stride_head;
};

inline constexpr int kQueueInts = 64;
inline constexpr int kMostCtas = 256;  // of the forward, that first units are written down for
inline constexpr int kFirstUnitBytes = kMostCtas * 2 * 1408;  // 1408: of a FirstUnit
inline constexpr int kMaxGroup = 16;                          // query heads per KV head
// Packed rows of a query and KV head, at most: they fit a wide unit.
inline constexpr int kMaxQueryRows = 128;

struct SnapshotArgs : Buffers {
  const int32_t* req_to_token;  // [R, req_to_token_width], rows req_to_token_stride apart
  int64_t req_to_token_stride, req_to_token_width;
  const void* rows;      // [num_rows] row of req_to_token; int32 or int64
  const void* seq_lens;  // [num_rows] int32 or int64
  int32_t rows_bytes, seq_lens_bytes;
  int32_t num_rows;  // of the batch
};

// Functions that take a stream only launch kernels on it. They neither allocate nor synchronise, so
// a CUDA graph can capture them; it then serves every plan that fits the buffers. They throw
// std::runtime_error with the error of a launch, and std::invalid_argument for what the kernels do
// not support.

// Bytes of shared memory that a CTA of the forward needs at least. Throws std::invalid_argument
// for a head dim that has no kernel.
int min_shared_bytes(int head_dim);

// Throws std::invalid_argument for what the kernels do not support. Looks only at sizes, strides
// and numbers, so it needs no device.
void check_decode(const DecodeParams& params);

// Forward of all items, then the merge of queries with several splits.
void decode_cuda(const DecodeParams& params, void* stream);

// Copies the slots of every token that the plan's items read into the list whose address the plan's
// header has, and writes each item's number of tokens into the plan. A tail gets at most its room.
// Then writes down what each half of the forward's CTAs begins with. Called once per step.
void snapshot_cuda(const SnapshotArgs& args, void* stream);

// Masks of draft tokens that are a tree: from a byte a cell, as serving engines write them, to the
// 64 bits a draft token that the forward reads.
struct DraftMaskArgs {
  // One query after the other, a row for each of its draft tokens, which has a cell for each of
  // these: not 0 where the row's token attends to it.
  const uint8_t* cells;
  int64_t num_cells;
  // Tokens of each query without the draft tokens. Null: rows have cells for draft tokens only.
  // Else a row begins with as many cells as its query has tokens here.
  const void* seq_lens;
  int32_t seq_lens_bytes;  // of an element, 4 or 8
  int32_t num_rows;        // queries, with those that pad the batch
  int32_t draft_tokens;    // 1 to 64
  uint64_t* masks;         // [num_rows, draft_tokens]
};

// Writes all masks on `stream`, with one launch. Bits of cells beyond `num_cells` are 0. Throws
// std::runtime_error with the error of the launch.
void draft_masks_cuda(const DraftMaskArgs& args, void* stream);

// Why no kernel of ours runs on `device`: "" if one did, which it waits for, else the step that
// failed and CUDA's reason. Never throws: a machine without a GPU or driver is an answer, not an
// error. Leaves the calling thread's current device as it was.
std::string cuda_probe(int device);

// The forward kernel's parameters: what it needs of the caller's, and what launch.cu makes of them.
// It gets no others, because small batches take 0.2 us longer with all of DecodeParams
// (docs/lessons.md).
struct ForwardParams {
  const PlanHeader* plan;
  const char* q;
  int64_t q_stride_query, q_stride_head;
  const char* k;
  const char* v;
  uint32_t k_stride_slot, k_stride_head;  // 32 bits, so that an address takes one instruction
  uint32_t v_stride_slot, v_stride_head;
  const uint16_t* row_masks;
  char* out;
  int64_t out_stride_query, out_stride_head;
  float* lse;
  char* partials;
  float* partial_lse;
  int32_t* queue;                // next ticket of heavy units, of light ones; halves that are done
  const FirstUnit* first_units;  // [CTAs, 2], or null
  int32_t num_rows;
  // To the kernel the query heads of a query's draft tokens are heads of the query, one draft token
  // after the other; so are they in `partials`, `lse` and `out`.
  int32_t num_q_heads, num_kv_heads;
  int32_t group;                       // packed rows of a query (plan.h)
  uint32_t group_magic;                // r / group == r * group_magic >> 16 for packed rows r
  uint32_t kv_heads_magic;             // divisor_magic(num_kv_heads)
  uint32_t grid_magic;                 // divisor_magic(CTAs)
  int32_t min_row_tile, max_row_tile;  // run only items of these row tiles
  int32_t half_bytes;                  // shared memory of a half
  int32_t stages;
  int32_t q_buffers;  // 1 or 2: see footprint()
  bool narrow;        // there is room for narrow units
  bool float_partials;
  // The factors of q . k include k_scale.
  float exp_scale;  // factor of q . k inside exp2, or of the transformed logit
  float pre_scale;  // kScaled: factor to the base-2 logit; kCapped: factor inside exp2 of tanh
  float cap;        // kCapped: base-2 logit cap
  int32_t logits;   // Logits
  float v_scale;    // factor of the output
  Sinks sinks;
  // Of several draft tokens. Else zeros, which no kernel reads, but for head_group, which
  // first_units_kernel reads.
  // Draft tokens of a query but the first: the last tokens of its tail, to which only some of its
  // draft tokens attend.
  int32_t masked_tokens;
  int32_t head_group;         // packed rows of a draft token: query heads per KV head
  uint32_t head_group_magic;  // r / head_group == r * head_group_magic >> 16 for r below group
  // From the head behind the last one of a draft token and KV head to the first one of the next
  // draft token: in heads, and in bytes of q.
  int32_t heads_between;
  int64_t bytes_between;
  const uint64_t* draft_masks;  // as in DecodeParams
};

enum Logits : int { kPlain = 0, kScaled = 1, kCapped = 2 };

}  // namespace pat
