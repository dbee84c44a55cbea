// The CPU kernels as a shared library with a C interface, bound by quire_kernels/cpu.py.
//
// The library runs on every x86-64 processor with AVX2: it has the kernels once per instruction set, and `quire_select`
// takes one of them.

#include <cpuid.h>

#include <cstring>
#include <string>

#include "kernels.h"
#include "shared_blocks.h"

#define QUIRE_API __attribute__((visibility("default")))

namespace {

Kernels kernels{};

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

bool has_avx512_bf16() { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

// Compilers know no name for it before GCC 13. That the system saves the registers, it does with AVX2's.
bool has_avx_vnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & (1u << 4)) != 0;
}

// AMX-TILE, AMX-INT8 and AMX-BF16. Linux lets a process use tiles, in all of its threads, only after it has requested them.
bool has_amx() {
  constexpr unsigned FEATURES = 1u << 22 | 1u << 24 | 1u << 25;
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a = 0, b = 0, c = 0, d = 0;
  return has_avx512_bf16() && __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & FEATURES) == FEATURES &&
         syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

struct InstructionSet {
  const char* name;
  bool (*is_there)();
  const Kernels& kernels;
};

constexpr InstructionSet INSTRUCTION_SETS[] = {
    {"amx", has_amx, avx512_bf16_kernels},
    {"avx512_bf16", has_avx512_bf16, avx512_bf16_kernels},
    {"avx512_vnni", has_avx512_vnni, avx512_vnni_kernels},
    {"avx512", has_avx512, avx512_kernels},
    {"avx_vnni", has_avx_vnni, avx_vnni_kernels},
    {"avx2", has_avx2, avx2_kernels},
};

bool take(const char* name, bool is_emulated) {
  for (const InstructionSet& set : INSTRUCTION_SETS) {
    if (std::strcmp(name, set.name) != 0 || !(is_emulated || set.is_there())) continue;
    kernels = set.kernels;
    has_tiles = &set == INSTRUCTION_SETS;
    return true;
  }
  return false;
}

std::string constant(const char* name, int64_t value) { return std::string(name) + "=" + std::to_string(value) + " "; }

std::string layout() {
  return constant("VERSION", VERSION) + constant("PANEL", PANEL) + constant("HEAD_SIZE_STEP", HEAD_SIZE_STEP) +
         constant("MAX_HEAD_SIZE", MAX_HEAD_SIZE) + constant("ACTIVATION_GROUP", ACTIVATION_GROUP) +
         constant("SUPER_GROUP", SUPER_GROUP) + constant("SCALE_BYTES", SCALE_BYTES) + MIRRORED;
}

}  // namespace

extern "C" {

// What the caller has to agree with before it calls anything else: constants, and the declarations of all structures.
QUIRE_API const char* quire_layout() {
  static const std::string text = layout();
  return text.c_str();
}

// Takes the kernels of an instruction set. Returns 0 when the processor lacks it, or when there is none of that name.
QUIRE_API int quire_select(const char* name) { return take(name, false); }

// The same where the processor may lack it, for tests that emulate its instructions.
QUIRE_API int quire_select_emulated(const char* name) { return take(name, true); }

// How many threads share a kernel's work, the caller's own among them.
QUIRE_API void quire_set_threads(int64_t threads) { pool().set_threads(threads); }
QUIRE_API int64_t quire_threads() { return pool().threads(); }

// Several kernels, one after the other, with so many rows.
QUIRE_API void quire_run(const RecordedCall* calls, int64_t count, int64_t rows) {
  for (int64_t i = 0; i < count; i++) {
    if (calls[i].rows != nullptr) *calls[i].rows = rows;
    calls[i].kernel(calls[i].call);
  }
}

QUIRE_API void quire_linear(const LinearCall* call) { kernels.linear(*call); }
QUIRE_API void quire_head_linear(const HeadLinearCall* call) { kernels.head_linear(*call); }
QUIRE_API void quire_lora_shrink(const LoraCall* call) { kernels.lora_shrink(*call); }
QUIRE_API void quire_pack_linear(const PackCall* call) { kernels.pack_linear(*call); }
QUIRE_API void quire_quantize_groups(const GroupSearchCall* call) { kernels.quantize_groups(*call); }
QUIRE_API void quire_rope(const RopeCall* call) { kernels.rope(*call); }
// Returns the bytes of the plan, which is written only where there is room for it.
QUIRE_API int64_t quire_plan_attention(const PlanCall* call) { return plan_attention(*call, kernels.attention_tile); }
QUIRE_API void quire_attention(const AttentionCall* call) { kernels.attention(*call); }
QUIRE_API void quire_rms_norm(const NormCall* call) { kernels.rms_norm(*call); }
QUIRE_API void quire_layer_norm(const NormCall* call) { kernels.layer_norm(*call); }
QUIRE_API void quire_gated_rms_norm(const GatedNormCall* call) { kernels.gated_rms_norm(*call); }
QUIRE_API void quire_causal_conv(const CausalConvCall* call) { kernels.causal_conv(*call); }
QUIRE_API void quire_gated_delta_rule(const GatedDeltaCall* call) { kernels.gated_delta_rule(*call); }
QUIRE_API void quire_state_space(const StateSpaceCall* call) { kernels.state_space(*call); }
QUIRE_API void quire_rg_lru(const RgLruCall* call) { kernels.rg_lru(*call); }
QUIRE_API void quire_activate_and_mul(const ActivationCall* call) { kernels.activate_and_mul(*call); }
QUIRE_API void quire_xielu(const XieluCall* call) { kernels.xielu(*call); }
QUIRE_API void quire_soft_cap(const SoftCapCall* call) { kernels.soft_cap(*call); }
QUIRE_API void quire_scale_rows(const ScaleRowsCall* call) { kernels.scale_rows(*call); }
QUIRE_API void quire_mix_streams(const MixStreamsCall* call) { kernels.mix_streams(*call); }
QUIRE_API void quire_match_rms(const MatchRmsCall* call) { kernels.match_rms(*call); }
QUIRE_API void quire_row_moments(const GaussianCall* call) { kernels.row_moments(*call); }
QUIRE_API void quire_gaussian_topk(const GaussianCall* call) { kernels.gaussian_topk(*call); }
QUIRE_API void quire_sum_rows(const SumRowsCall* call) { kernels.sum_rows(*call); }
QUIRE_API void quire_quantize_per_token(const QuantizeCall* call) { kernels.quantize_per_token(*call); }
QUIRE_API void quire_embedding(const EmbeddingCall* call) { kernels.embedding(*call); }
QUIRE_API void quire_store_rows(const StoreCall* call) { kernels.store_rows(*call); }
QUIRE_API void quire_store_columns(const StoreColumnsCall* call) { kernels.store_columns(*call); }
QUIRE_API void quire_load_rows(const LoadCall* call) { kernels.load_rows(*call); }
QUIRE_API void quire_sample(const SampleCall* call) { kernels.sample(*call); }
QUIRE_API void quire_probabilities(const ProbabilitiesCall* call) { kernels.probabilities(*call); }
QUIRE_API void quire_token_probabilities(const TokenProbabilitiesCall* call) { kernels.token_probabilities(*call); }
QUIRE_API void quire_advance_drafts(const AdvanceCall* call) { kernels.advance_drafts(*call); }
QUIRE_API void quire_route_tokens(const RouteCall* call) { kernels.route_tokens(*call); }
QUIRE_API void quire_route_tokens_in_groups(const GroupedRouteCall* call) { kernels.route_tokens_in_groups(*call); }
QUIRE_API void quire_experts(const ExpertsCall* call) { kernels.experts(*call); }
QUIRE_API void quire_apply_bitmask(const BitmaskCall* call) { kernels.apply_bitmask(*call); }
QUIRE_API void quire_convert_pages(const PagesCall* call) { kernels.convert_pages(*call); }

// Of what these return, negative numbers are shared_blocks::Failure.
using SharedHeader = shared_blocks::Header;
QUIRE_API int64_t quire_shared_attach(void* memory, int64_t bytes, float seconds) {
  return shared_blocks::attach(static_cast<SharedHeader*>(memory), bytes, seconds);
}
QUIRE_API int64_t quire_shared_detach(void* memory, int64_t attachment, float seconds) {
  return shared_blocks::detach(static_cast<SharedHeader*>(memory), attachment, seconds);
}
QUIRE_API int64_t quire_shared_divide(void* memory, int64_t block_bytes, float seconds) {
  return shared_blocks::divide(static_cast<SharedHeader*>(memory), block_bytes, seconds);
}
QUIRE_API int64_t quire_shared_describe(void* memory, SharedBlocksState* state, float seconds) {
  return shared_blocks::describe(static_cast<SharedHeader*>(memory), state, seconds);
}
QUIRE_API int64_t quire_shared_count(const SharedBlocksCall* call) {
  return shared_blocks::count_there(static_cast<SharedHeader*>(call->memory), *call);
}
QUIRE_API int64_t quire_shared_list(const SharedBlocksCall* call) {
  return shared_blocks::list(static_cast<SharedHeader*>(call->memory), *call);
}
QUIRE_API int64_t quire_shared_write(const SharedBlocksCall* call) {
  return shared_blocks::write(static_cast<SharedHeader*>(call->memory), *call, kernels.copy_digest);
}
QUIRE_API int64_t quire_shared_read(const SharedBlocksCall* call, int64_t* damaged) {
  return shared_blocks::read(static_cast<SharedHeader*>(call->memory), *call, kernels.copy_digest, damaged);
}
// The steps of these two, for who copies in another way.
QUIRE_API int64_t quire_shared_reserve(const SharedBlocksCall* call) {
  return shared_blocks::reserve(static_cast<SharedHeader*>(call->memory), *call);
}
QUIRE_API int64_t quire_shared_commit(const SharedBlocksCall* call) {
  return shared_blocks::commit(static_cast<SharedHeader*>(call->memory), *call, call->blocks);
}
QUIRE_API int64_t quire_shared_pin(const SharedBlocksCall* call) {
  return shared_blocks::pin(static_cast<SharedHeader*>(call->memory), *call);
}
QUIRE_API int64_t quire_shared_unpin(const SharedBlocksCall* call) {
  return shared_blocks::check_and_unpin(static_cast<SharedHeader*>(call->memory), *call, call->blocks);
}
QUIRE_API void quire_copy_digest(const void* source, void* target, int64_t bytes, int64_t around, uint64_t* digest) {
  kernels.copy_digest(source, target, bytes, around != 0, digest);
}
}
