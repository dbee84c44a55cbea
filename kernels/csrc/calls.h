// What the kernels are called with: plain structures, which the ops of quire_kernels fill. `quire_layout` gives out these
// declarations as text, from which quire_kernels/cpu.py makes its own structures.
#pragma once
#include <cstdint>

// As in quire_kernels/cpu.py, which uses no library that has others.
constexpr int VERSION = 8;  // of this interface: to be raised when a field changes its meaning
constexpr int PANEL = 32;   // output features of a packed weight that lie together
constexpr int64_t HEAD_SIZE_STEP = 16;
constexpr int64_t MAX_HEAD_SIZE = 1024;
constexpr int64_t ACTIVATION_GROUP = 128;  // columns of activations that share a scale beside a weight of groups
constexpr int64_t SUPER_GROUP = 256;       // columns of such a weight that share a super-scale
constexpr int64_t SCALE_BYTES = 4;  // of a token and head, behind the codes of an int8 tile

// How many numbers of a weight fill 32 bits, which says what they are.
enum LinearKind : int32_t { LINEAR_FLOAT32 = 1, LINEAR_BF16 = 2, LINEAR_INT8 = 4, LINEAR_INT4 = 8 };

// What scales or offsets of groups are: GROUP_SUPER is int8, times a super-scale; offsets of GROUP_UINT8 are times the
// scale.
enum GroupForm : int32_t { GROUP_NONE = 0, GROUP_FLOAT16 = 1, GROUP_FLOAT32 = 2, GROUP_SUPER = 3, GROUP_UINT8 = 4 };

// How the source of a packed weight has codes of 4 bits: one in a byte, or two, the first in the lower bits.
enum CodeForm : int32_t { NO_CODES = 0, CODES_SINGLE = 1, CODES_PAIRED = 2 };

// Of a feed-forward block, or of its gate.
enum Activation : int32_t {
  NO_ACTIVATION = 0, SILU = 1, GELU_TANH = 2, SWIGLUOAI = 3, GELU = 4, RELU2 = 5, SIGMOID = 6
};

typedef void KernelFunction(const void* call);

// Declares structures, and keeps the text of their declarations (without comments).
#define QUIRE_MIRRORED(...) \
  __VA_ARGS__               \
  constexpr char MIRRORED[] = #__VA_ARGS__;

QUIRE_MIRRORED(

// A and B of a projection, in a slot; see lora.inc.
struct LoraPair {
  const void* a;
  const void* b;
  int64_t rank;  // 0: there are none
};

// The adapters of a linear layer.
struct LoraLayer {
  const LoraPair* pairs;  // [slots, projections]
  const int64_t* ends;    // [projections], the output features up to the end of each
  int64_t projections;
  int64_t slots;
  int64_t in_features;
  int64_t hidden_size;    // elements that a projection has in `hidden`
  int32_t is_float;       // else bfloat16, as are A, B, x and hidden
  const float* const* scales;  // [slots, projections], of the base's features, up to whole panels of 16 with 1; null: 1
};

// hidden = x · Aᵀ of each row's adapter. Rows whose adapter changes the layer are sorted by slot.
struct LoraCall {
  const LoraLayer* layer;
  const void* x;         // [rows, in_features]
  int64_t x_stride;      // elements between rows
  const int64_t* index;  // [rows], the slot of each; -1: none
  int64_t* sorted;       // [1 + rows], written: how many there are, then which
  void* hidden;          // [rows + 15, projections, hidden_size], written, in this order
  int64_t rows;
};

struct LinearCall {
  const void* x;                  // [rows, in_features], bfloat16, float32 or uint8; readable up to a whole group
  int64_t x_stride;               // elements between rows, or between the parts of rows
  const void* weight;             // packed, see linear.inc
  const float* bias;              // [panels * 32], or null
  const float* x_scales;          // [rows, x_parts], int8 only
  const int32_t* x_zeros;         // [rows], what 0 is in x; null: 128
  const float* weight_scales;     // [panels * 32], int8 only
  const int32_t* weight_offsets;  // [panels * 32], 128 times the sum of each feature's weights, int8 only
  void* out;                      // [rows, out_features], bfloat16 or float32
  int64_t out_stride;
  int64_t rows;
  int64_t in_features;
  int64_t out_features;
  int32_t kind;                   // LinearKind
  int32_t out_is_float;
  int32_t activation;             // Activation, of the result or of the gate
  int32_t is_gated;               // panels hold 16 features of the gate, then 16 of the other half, and out has half as
                                  // many
  int32_t x_parts;                // 2: x is [rows, 2, in_features], as QuantizeCall writes it; int8 only
  // Of a weight of groups, see grouped.inc. Then x is int8 and rows are counted by parts: x_stride is how many it has room for.
  const int32_t* x_starts;        // [groups, rows], -zero times the sum of each group of x
  const float* x_sums;            // likewise, -1 times
  const uint8_t* table;           // [16], or null
  const void* group_scales;       // [panels, groups, 32]
  const void* group_offsets;      // likewise, or null
  const void* super_scales;       // [panels, in_features / SUPER_GROUP, 32] float16, or null
  const void* super_offsets;      // likewise
  int64_t group_size;             // columns; 0: the weight has no groups
  int32_t zero;
  int32_t scale_form;             // GroupForm
  int32_t offset_form;            // GroupForm
  const LoraLayer* lora;          // or null; hidden · Bᵀ is added before the activation
  const int64_t* lora_index;      // [rows], as in LoraCall; so are the next two
  const int64_t* lora_sorted;
  const void* lora_hidden;
  int64_t lora_first;             // the number of the first output feature in the layer
  const int64_t* lora_places;     // where each row is in lora_delta, or -1; null but while a panel is computed, as is
  const float* lora_delta;        // what is added to the rows of a block, see lora.inc
  const float* lora_scales;       // what multiplies them before, without the bias, likewise; null: 1
};

// A linear layer for each head: unquantised, without bias and activation.
struct HeadLinearCall {
  const void* x;           // [rows, heads, in_features], bfloat16 or float32, as is out
  int64_t x_token_stride;  // elements
  int64_t x_head_stride;
  const void* weight;      // packed: whole panels of each head, one head after another
  void* out;               // [rows, heads, out_features], without gaps
  int64_t rows;            // tokens
  int64_t heads;
  int64_t in_features;
  int64_t out_features;
  int32_t kind;            // LinearKind
};

struct PackCall {
  const void* source;     // [out_features, in_features], bfloat16, float32, int8, or words of codes as if float32
  int64_t source_stride;  // elements between rows
  const int64_t* rows;    // [panels * 32], which row of the source goes there; out_features: none, but zeros
  void* packed;           // see linear.inc
  float* scales;          // [panels * 32], written if quantize
  int32_t* offsets;       // [panels * 32], written if what is packed is int8
  int64_t panels;
  int64_t in_features;    // whole groups
  int64_t out_features;
  int32_t kind;           // LinearKind of the source
  int32_t quantize;       // to int8
  int32_t code_form;      // CodeForm
};

// The inner order of both caches is drawn in attention.inc.
struct RopeCall {
  const void* query;              // [rows, heads, head_size], bfloat16 or float32, as are all others of void*, but for
                                  // caches in int8
  int64_t query_token_stride;     // elements
  int64_t query_head_stride;
  const void* key;                // [rows, kv_heads, head_size]
  int64_t key_token_stride;
  int64_t key_head_stride;
  const void* value;              // [rows, kv_heads, head_size]; null, as value_cache then is: there are none
  int64_t value_token_stride;
  int64_t value_head_stride;
  const void* query_norm;         // [head_size], the weight of the norm of each head before its rotation; or null
  const void* key_norm;           // likewise
  const void* value_norm;         // likewise; values are not rotated
  const int64_t* positions;       // [rows]
  const float* cos_sin;           // [max_position, rotary_size]
  const float* query_cos_sin;     // likewise, for the queries
  const int64_t* slot_mapping;    // [rows]
  void* rotated_query;            // [rows, heads, head_size], without gaps
  void* key_cache;
  void* value_cache;
  int64_t rows;                   // tokens
  int64_t heads;
  int64_t kv_heads;
  int64_t head_size;
  int64_t rotary_size;            // features of a head, from the first on, that are rotated
  int64_t block_size;
  float eps;                      // of the norms
  int32_t is_float;
  int32_t norm_is_float;          // else the norms' weights are of the others' type
  int32_t cache_is_int8;          // else of the others' type
};

// A part of a step's attention: some query rows of one sequence against one KV head. Rows are numbered over the query
// tokens and, within a token, over the query heads that share the KV head.
struct AttentionItem {
  int32_t sequence;
  int32_t kv_head;
  int32_t first_row;
  int32_t rows;
  int32_t segment;  // the only one to compute, or -1 for all; of a merge, how many there are
  int32_t partial;  // where the partial results of the item's rows go, or those of a merge begin
};

// Followed by the items, longest first; then by an int32 for each bundle, the end of its items; then by the merges.
struct AttentionPlan {
  int64_t items;
  int64_t bundles;   // what one thread takes at a time
  int64_t merges;    // items whose segments were computed by several threads
  int64_t partials;  // float32 numbers of partial results
};

struct PlanCall {
  const int64_t* query_start_loc;  // [sequences + 1]
  const int64_t* seq_lens;         // [sequences]
  void* plan;                      // AttentionPlan and what follows it
  int64_t capacity;                // bytes at `plan`
  int64_t sequences;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_size;
  int64_t block_size;
  int64_t window;                  // keys that a row sees up to itself; without a window, more than any sequence has;
                                   // below 0 it sees the keys of its own chunk, of -window, up to itself
  int32_t is_causal;               // else it sees as many from itself on
};

// What the layers of a step that have the same heads and the same window have in common.
struct AttentionStep {
  const int64_t* block_table;      // [sequences, …]
  int64_t block_table_stride;
  const int64_t* query_start_loc;  // [sequences + 1]
  const int64_t* seq_lens;         // [sequences]
  const void* plan;                // AttentionPlan and what follows it
  float* partials;                 // [plan.partials]
};

struct AttentionCall {
  const void* query;               // [tokens, heads, head_size], bfloat16 or float32, as are all others of void*, but
                                   // for caches in int8
  int64_t query_token_stride;      // elements
  int64_t query_head_stride;
  const void* key_cache;
  const void* value_cache;         // null: values are the last value_size features of the keys
  void* out;                       // [tokens, heads, value_size], without gaps
  const float* sinks;              // [heads], a logit in the sum of each query head's weights that has no value; or null
  const float* position_bias;      // [heads, 2 * bias_reach + 1], added to the scores, after soft_cap, of keys at a
                                   // distance of -bias_reach and so on; the HEAD_SIZE_STEP numbers at each end are equal
                                   // and hold for all distances beyond; or null
  int64_t bias_reach;
  const AttentionStep* step;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_size;               // of queries and keys
  int64_t value_size;              // of values, a multiple of HEAD_SIZE_STEP; head_size if there is a value cache
  int64_t block_size;
  int64_t window;                  // that the step's plan is for
  int32_t is_causal;               // likewise
  float scale;
  float soft_cap;                  // scores become soft_cap * tanh(score / soft_cap); 0: they stay
  int32_t is_float;
  int32_t cache_is_int8;           // else of the queries' type
};
// hidden, residual and out are bfloat16 or float32, all alike; rows may be strided, elements of a row not.
struct NormCall {
  const void* hidden;    // [rows, size]
  int64_t hidden_stride; // elements between rows
  void* residual;        // [rows, size], added to and written; or null
  int64_t residual_stride;
  const void* weight;    // [size], of their type or float32; LayerNorm's is float32
  const float* bias;     // [size], of LayerNorm; or null
  void* out;             // [rows, size]; null: the rows are only added
  int64_t out_stride;
  int64_t rows;
  int64_t size;
  float eps;
  float multiplier;      // of hidden, before it is added to the residual
  float scale;           // of the sum
  int32_t is_float;
  int32_t weight_is_float;
  int64_t heads;         // LayerNorm's rows have so many parts of `size`, each with a mean and weights of its own
};

struct ActivationCall {
  const void* gate;     // [rows, size], or [rows, size / width]
  int64_t gate_stride;  // elements between rows
  const void* up;       // [rows, size]
  int64_t up_stride;
  void* out;            // [rows, size], without gaps
  int64_t rows;
  int64_t size;
  int64_t width;        // elements of a row that have the same gate, one after another
  int32_t is_float;
  int32_t activation;   // Activation
};

struct ScaleRowsCall {
  const void* hidden;    // [rows, size]
  int64_t hidden_stride; // elements between rows
  const float* scale;    // [rows]
  void* out;             // [rows, size], without gaps
  int64_t rows;
  int64_t size;
  int32_t is_float;
};

struct XieluCall {
  const void* x;          // [rows, size]
  int64_t x_stride;       // elements between rows
  const float* positive;  // [1], the learned number of positive x
  const float* negative;  // [1], likewise
  void* out;              // [rows, size], without gaps
  int64_t rows;
  int64_t size;
  int32_t is_float;
};

// Streams beside each other, as in AltUp; see streams.inc. All of void* are bfloat16 or float32, all alike.
struct MixStreamsCall {
  const void* base;        // [rows, outputs, size]
  int64_t base_stride;     // elements between rows
  const void* inputs;      // [rows, inputs, size]
  int64_t inputs_stride;
  const float* routes;     // [rows, routes_size]
  const float* weight;     // [outputs, inputs, routes_size]
  void* out;               // [rows, outputs, size], without gaps
  int64_t rows;
  int64_t num_outputs;
  int64_t num_inputs;
  int64_t routes_size;
  int64_t size;
  float offset;            // added to each coefficient
  int32_t is_float;
};

struct MatchRmsCall {
  const void* hidden;      // [rows, size], bfloat16 or float32, as are like and out
  int64_t hidden_stride;   // elements between rows
  const void* like;        // [rows, size]
  int64_t like_stride;
  void* out;               // [rows, size]
  int64_t out_stride;
  int64_t rows;
  int64_t size;
  float floor;             // of the mean square of hidden
  int32_t is_float;
};

// Of row_moments, which writes the moments, and of gaussian_topk, which reads them.
struct GaussianCall {
  const void* x;        // [rows, size], bfloat16 or float32, as is out
  int64_t x_stride;     // elements between rows
  float* moments;       // [rows, 2], mean and variance
  void* out;            // [rows, size], without gaps; null in row_moments
  int64_t rows;
  int64_t size;
  float multiplier;     // of the standard deviation
  int32_t is_float;
};

// Sums of the rows of groups; see sum_rows.inc.
struct SumRowsCall {
  const void* hidden;      // [rows, size], bfloat16 or float32
  int64_t hidden_stride;   // elements between rows
  const int64_t* starts;   // [groups + 1], the rows of each group
  double* sums;            // [groups, size], written
  int64_t groups;
  int64_t size;
  int32_t is_float;
};

struct SoftCapCall {
  float* logits;          // [rows, size], written
  int64_t logits_stride;  // elements between rows
  int64_t rows;
  int64_t size;
  float cap;
};

struct QuantizeCall {
  const void* x;  // [rows, size]
  int64_t x_stride;
  uint8_t* out;   // [rows, parts, size], without gaps
  float* scales;  // [rows, parts]
  int64_t rows;
  int64_t size;
  int32_t is_float;
  int32_t parts;  // 2: x rounded, and what rounding has left
  int64_t group_size;  // of a weight of groups, or 0; see grouped.inc for how out and scales lie then
  int64_t out_rows;    // that out has room for, by parts
  int32_t* starts;
  float* sums;
  int32_t zero;
  int32_t* zeros;      // [rows], written: what 0 is in out, which then has the range of each row; null: 128
  const float* column_factors;  // [size], what x is multiplied by before, if `zeros` is given; or null
};

struct GroupSearchCall {
  const void* source;       // [rows, in_features], bfloat16 or float32
  int64_t source_stride;    // elements
  const float* importance;  // [in_features], of the squared errors; or null
  uint8_t* codes;           // [rows, in_features], without gaps: 8 more than the integers
  float* scales;            // [rows, in_features / group_size]
  int64_t rows;
  int64_t in_features;
  int64_t group_size;       // at most 128; 16 divides it
  int32_t is_float;
};

struct EmbeddingCall {
  const int64_t* token_ids;  // [rows]
  const void* weight;        // packed, see linear.inc
  const float* scales;       // int8 only, else null
  void* out;                 // [rows, size], without gaps
  int64_t rows;
  int64_t size;
  int32_t is_float;
  const void* grouped;       // LinearCall of a weight of groups, else null
};

struct RouteCall {
  const float* logits;   // [rows, experts]
  int64_t logits_stride; // elements between rows
  const float* scale;    // [experts], of the weights; or null
  float* weights;        // [rows, top_k], written
  int64_t* expert_ids;   // [rows, top_k], written
  int64_t* counts;       // [experts], of tokens that chose each, counted on; or null
  int64_t rows;
  int64_t experts;
  int64_t top_k;
  int32_t renormalize;   // the weights add up to 1
  float jitter;          // of SparseMixer; 0: the weights are a softmax
};

// The same among the experts of a token's best groups; experts are groups of equal size, in order.
struct GroupedRouteCall {
  const float* logits;   // [rows, experts]
  int64_t logits_stride; // elements between rows
  const float* bias;     // [experts], added to scores for the choice alone; or null
  float* weights;        // [rows, top_k], written
  int64_t* expert_ids;   // [rows, top_k], written
  int64_t* counts;       // [experts], of tokens that chose each, counted on; or null
  int64_t rows;
  int64_t experts;
  int64_t top_k;
  int64_t groups;
  int64_t top_groups;
  float scale;           // of the weights
  int32_t is_sigmoid;    // scores are sigmoids, and a group's is the sum of its best two; else a softmax, and its best
  int32_t renormalize;   // the weights add up to 1, before they are scaled
};

struct ExpertsCall {
  const void* x;              // [rows, hidden_size], bfloat16 or float32, as are shared and out; null with results
  int64_t x_stride;           // elements between rows
  const float* weights;       // [rows, top_k]
  const int64_t* expert_ids;  // [rows, top_k]
  const int64_t* expert_map;  // where each expert is among those that are here; -1: it is not
  const LinearCall* gate_up;  // [experts], of those that are here; without x and out, as in all of one shape
  const LinearCall* down;     // [experts]
  const void* shared;         // [rows, hidden_size], added to the result; or null
  int64_t shared_stride;
  const float* shared_gate;   // [rows], whose sigmoid multiplies it; or null
  const float* results;       // [rows, top_k, hidden_size], of experts elsewhere: they are only added up; or null
  void* out;                  // [rows, hidden_size], without gaps
  int64_t rows;
  int64_t experts;
  int64_t top_k;
  int64_t hidden_size;
  int64_t intermediate_size;
  int32_t is_float;
  int32_t out_is_float;  // the sum is not rounded; without shared
  const LoraLayer* lora_gate_up;  // or null; slots are those of all experts, of [experts, adapters]; so of the next
  const LoraLayer* lora_down;
  const int64_t* lora_index;      // [rows], the adapter of each; -1: none
};

// RMSNorm of groups of features, with a gate before or after it.
struct GatedNormCall {
  const void* hidden;     // [rows, size], bfloat16 or float32, as are gate and out
  int64_t hidden_stride;  // elements between rows
  const void* gate;
  int64_t gate_stride;
  const float* weight;    // [weight_size]
  void* out;              // [rows, size], without gaps
  int64_t rows;
  int64_t size;
  int64_t group_size;
  int64_t weight_size;    // size, or group_size
  float eps;
  int32_t gates_first;
  int32_t is_float;
};

// The sequences of a step and their states: StateRows of quire_kernels/states.py.
struct StateStep {
  const int64_t* positions;
  const int64_t* query_start_loc;
  const int64_t* sources;
  const int64_t* num_replayed;
  const int64_t* targets;
  const int64_t* store_start_loc;
  const int64_t* store_lens;
  const int64_t* store_blocks;
  int64_t sequences;  // at most
};

// A short convolution over the tokens of sequences, whose last inputs are in rings; see causal_conv.inc.
struct CausalConvCall {
  const void* x;                   // [rows, channels], bfloat16 or float32, as is out
  int64_t x_stride;                // elements between rows
  const float* weight;             // [channels, width]
  int64_t weight_channel_stride;
  int64_t weight_tap_stride;
  const float* bias;               // [channels], or null
  float* ring;                     // [any, ring_size, channels]
  int64_t ring_stride;             // elements between blocks
  void* out;                       // [rows, channels], without gaps
  int64_t channels;
  int64_t width;
  int64_t ring_size;
  int32_t activation;              // Activation: none or SILU
  int32_t is_float;
  StateStep step;
  int64_t rows;
};

// Recurrences whose states are in blocks; see recurrence.inc. Inputs and out are bfloat16 or float32.
struct GatedDeltaCall {
  const void* query;               // [rows, groups, size]
  int64_t query_stride;            // elements between rows
  const void* key;                 // likewise
  int64_t key_stride;
  const void* value;               // [rows, heads, width]
  int64_t value_stride;
  const void* gate;                // [rows, heads, gate_width]
  int64_t gate_stride;
  const void* beta;                // [rows, heads]
  int64_t beta_stride;
  const float* decay;              // [heads]
  const float* gate_bias;          // [heads, gate_width]
  float* state;                    // [any, heads, size, width]
  int64_t state_stride;            // elements between blocks
  float* ring;                     // [any, ring_size, inputs of a token]
  int64_t ring_stride;
  void* out;                       // [rows, heads, width], without gaps
  int64_t groups;
  int64_t heads;
  int64_t size;
  int64_t width;
  int64_t gate_width;              // 1, or size
  int64_t ring_size;
  float beta_scale;
  int32_t is_float;
  StateStep step;
  int64_t rows;
};

// Mamba's is of heads of one channel.
struct StateSpaceCall {
  const void* x;                   // [rows, heads, channels]
  int64_t x_stride;                // elements between rows
  const void* dt;                  // [rows, heads]
  int64_t dt_stride;
  const void* b;                   // [rows, groups, size]
  int64_t b_stride;
  const void* c;                   // likewise
  int64_t c_stride;
  const float* decay;              // [heads, decay_size]
  const float* skip;               // [heads], or null
  const float* dt_bias;            // [heads]
  float* state;                    // [any, heads, channels, size]
  int64_t state_stride;            // elements between blocks
  float* ring;                     // [any, ring_size, inputs of a token]
  int64_t ring_stride;
  void* out;                       // [rows, heads, channels], without gaps
  int64_t heads;
  int64_t channels;
  int64_t groups;
  int64_t size;
  int64_t decay_size;              // 1, or size
  int64_t ring_size;
  float dt_lowest;
  float dt_highest;
  int32_t is_float;
  StateStep step;
  int64_t rows;
};

struct RgLruCall {
  const void* x;            // [rows, heads, size]
  int64_t x_stride;         // elements between rows
  const void* gates;        // [rows, heads, 2, size], those of inputs and those of states
  int64_t gates_stride;
  const float* gate_bias;   // [heads, 2, size]
  const float* decay;       // [heads, size]
  float* state;             // [any, heads, size]
  int64_t state_stride;     // elements between blocks
  float* ring;              // [any, ring_size, inputs of a token]
  int64_t ring_stride;
  void* out;                // [rows, heads, size], without gaps
  int64_t heads;
  int64_t size;
  int64_t ring_size;
  int32_t is_float;
  StateStep step;
  int64_t rows;
};

struct StoreCall {
  const void* source;           // [rows, size], bfloat16 or float32, as is out
  int64_t source_stride;        // elements between rows
  const int64_t* slot_mapping;  // [rows], which row of out
  void* out;                    // [any, size]
  int64_t out_stride;
  int64_t rows;
  int64_t size;
  int32_t is_float;
};

struct LoadCall {
  const void* table;        // [any, size], bfloat16 or float32, as is out
  int64_t table_stride;     // elements between rows
  const int64_t* row_ids;   // [rows]
  void* out;                // [rows, size], without gaps
  int64_t rows;
  int64_t size;
  int32_t is_float;
};

struct StoreColumnsCall {
  const void* source;        // [rows, size], bfloat16 or float32, as is out
  int64_t source_stride;     // elements between rows
  const int64_t* columns;    // [size], which column of out
  void* out;                 // [rows, any]
  int64_t out_stride;
  int64_t rows;
  int64_t size;
  int32_t is_float;
};

struct TokenProbabilitiesCall {
  const float* logits;       // [rows, vocab_size]
  int64_t logits_stride;
  const int64_t* token_ids;  // [rows]
  float* probabilities;      // [rows], written
  int64_t rows;
  int64_t vocab_size;
};

struct AdvanceCall {
  const int64_t* token_ids;     // [rows], drawn
  const float* probabilities;   // [rows], of these
  int64_t* next_token_ids;      // [rows], written
  int64_t* drawn_token_ids;     // [any, capacity], of which row `place` is written
  float* drawn_probabilities;   // [any, capacity], likewise
  int64_t* place;               // one number, counted up
  int64_t* positions;           // [rows], counted up
  int64_t* draw_positions;      // [rows], counted up
  int64_t* seq_lens;            // [rows], written
  int64_t* slot_mapping;        // [rows], written
  const int64_t* block_table;   // [rows, blocks]
  int64_t blocks;
  int64_t block_size;
  int64_t capacity;
  int64_t rows;
};

struct SampleCall {
  const void* logits;        // [rows, vocab_size], bfloat16 or float32
  int64_t logits_stride;
  const float* temperature;  // [rows], 0 is greedy; null, and all that follows with it: every row is greedy
  const float* min_p;        // [rows]
  const int64_t* top_k;      // [rows]
  const float* top_p;        // [rows]
  const int64_t* seeds;      // [rows]
  const int64_t* positions;  // [rows]
  int64_t* token_ids;        // [rows], written
  int64_t rows;
  int64_t vocab_size;
  int32_t is_float;
};

struct ProbabilitiesCall {
  const void* logits;        // [rows, vocab_size], bfloat16 or float32
  int64_t logits_stride;
  const float* temperature;  // [rows], 0 is greedy
  const float* min_p;        // [rows]
  const int64_t* top_k;      // [rows]
  const float* top_p;        // [rows]
  float* probabilities;      // [rows, vocab_size], written
  int64_t rows;
  int64_t vocab_size;
  int32_t is_float;
};

struct BitmaskCall {
  float* logits;           // [any, vocab_size]
  int64_t logits_stride;
  const int64_t* row_ids;  // [rows], which rows of the logits
  const int32_t* bitmask;  // [rows, words]
  int64_t words;
  int64_t rows;
  int64_t vocab_size;
};

// Blocks of a paged KV cache to rows, or back.
struct PagesCall {
  void* const* caches;       // [2 * layers], keys and values of each, in the order of attention.inc; null: the layer
                             // keeps no values
  const int64_t* shapes;     // [2 * layers], of each KV heads and, for each of them, numbers of a token, scale included
  const int64_t* block_ids;  // [blocks]
  void* rows;                // [blocks, …], in the order of pages.inc
  int64_t row_stride;        // bytes
  int64_t layers;
  int64_t blocks;
  int64_t block_size;
  int32_t number_bytes;      // 4: float32; 2: bfloat16; 1: int8, with scales
  int32_t to_cache;
};

// KV blocks in memory that processes share; see shared_blocks.h.
struct SharedBlocksCall {
  void* memory;
  int64_t attachment;
  const void* group;    // 16 bytes
  void* hashes;         // [blocks], 32 bytes each
  void* const* places;  // [blocks], where the bytes are, or are to go
  uint32_t* slots;      // [blocks], + 1; 0: none
  uint64_t* digests;    // [blocks], 16 bytes each
  int64_t blocks;
  int64_t bytes;        // of each block
  float seconds;        // for the lock
};

// What is in that memory.
struct SharedBlocksState {
  int64_t slots;      // that there is room for
  int64_t slot_bytes;
  int64_t used;       // that hold a block, or are being written or read
  int64_t there;      // blocks
  int64_t evicted;    // since the beginning; so are these
  int64_t damaged;    // found to be wrong when they were read
  int64_t repairs;    // of the books, after a process has died in the middle of a change
  int64_t slots_at;   // bytes from the beginning of the memory
};

// A kernel and what it is called with, as it was noted down (quire_kernels/recording.py).
struct RecordedCall {
  KernelFunction* kernel;
  const void* call;
  int64_t* rows;  // of the call; null if it has none
};

)  // QUIRE_MIRRORED
