// What the units of the library have in common. Each of avx512_bf16.cpp, avx512.cpp and avx2.cpp compiles kernels.inc for
// its instruction sets; quire_kernels.cpp takes the kernels of one of them when the library is loaded.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "attention_plan.h"
#include "calls.h"
#include "digest.h"
#include "threads.h"

#define QUIRE_INLINE inline __attribute__((always_inline))
#define QUIRE_LAMBDA_INLINE __attribute__((always_inline))

inline bool has_tiles = false;    // the kernels of avx512_bf16 use AMX: quire_select
constexpr int64_t AMX_ROWS = 16;  // of a tile

struct Kernels {
  void (*linear)(const LinearCall&);
  void (*head_linear)(const HeadLinearCall&);
  void (*lora_shrink)(const LoraCall&);
  void (*rope)(const RopeCall&);
  void (*attention)(const AttentionCall&);
  AttentionTile attention_tile;
  void (*rms_norm)(const NormCall&);
  void (*layer_norm)(const NormCall&);
  void (*gated_rms_norm)(const GatedNormCall&);
  void (*causal_conv)(const CausalConvCall&);
  void (*gated_delta_rule)(const GatedDeltaCall&);
  void (*state_space)(const StateSpaceCall&);
  void (*rg_lru)(const RgLruCall&);
  void (*activate_and_mul)(const ActivationCall&);
  void (*xielu)(const XieluCall&);
  void (*quantize_per_token)(const QuantizeCall&);
  void (*embedding)(const EmbeddingCall&);
  void (*store_rows)(const StoreCall&);
  void (*store_columns)(const StoreColumnsCall&);
  void (*load_rows)(const LoadCall&);
  void (*sample)(const SampleCall&);
  void (*probabilities)(const ProbabilitiesCall&);
  void (*token_probabilities)(const TokenProbabilitiesCall&);
  void (*advance_drafts)(const AdvanceCall&);
  void (*apply_bitmask)(const BitmaskCall&);
  void (*pack_linear)(const PackCall&);
  void (*quantize_groups)(const GroupSearchCall&);
  void (*soft_cap)(const SoftCapCall&);
  void (*scale_rows)(const ScaleRowsCall&);
  void (*route_tokens)(const RouteCall&);
  void (*route_tokens_in_groups)(const GroupedRouteCall&);
  void (*experts)(const ExpertsCall&);
  void (*convert_pages)(const PagesCall&);
  void (*mix_streams)(const MixStreamsCall&);
  void (*match_rms)(const MatchRmsCall&);
  void (*row_moments)(const GaussianCall&);
  void (*gaussian_topk)(const GaussianCall&);
  void (*sum_rows)(const SumRowsCall&);
  CopyDigest* copy_digest;
};

extern const Kernels avx512_bf16_kernels, avx512_vnni_kernels, avx512_kernels, avx_vnni_kernels, avx2_kernels;
