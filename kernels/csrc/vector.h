// One instruction set's vectors, behind one set of names.
//
// This file is included once per instruction set, inside a namespace and a region compiled for it (see
// quire_kernels.cpp), and defines there:
//
//     WIDTH                     float32 lanes of a vector
//     Floats, Ints              a vector of float32; the same bits as integers
//     load, load_bf16, store …  memory ↔ Floats; bfloat16 is stored rounded to nearest even
//     dot_bf16                  the bfloat16 dot product of pairs, accumulated in float32
//     dot_u8s8                  the int8 dot product of quadruples, accumulated in int32
//     dot_u4s8                  the same where the unsigned numbers are below 16
//     look_up                   by byte, the number in a table of 16
//     dot_s16                   that of pairs of 16 bits
//     lanes_…                   a comparison, as a number with one bit per lane
//     Doubles, add_exactly      sums of float32 that do not depend on their order
//
// All of it is inlined; nothing here loops over memory.

#if defined(QUIRE_AVX512)

constexpr int WIDTH = 16;
using Floats = __m512;
using Ints = __m512i;

QUIRE_INLINE Floats zero() { return _mm512_setzero_ps(); }
QUIRE_INLINE Floats broadcast(float x) { return _mm512_set1_ps(x); }
QUIRE_INLINE Floats load(const float* p) { return _mm512_loadu_ps(p); }
QUIRE_INLINE void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
QUIRE_INLINE Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
QUIRE_INLINE Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
QUIRE_INLINE Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
QUIRE_INLINE Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
QUIRE_INLINE Floats square_root(Floats x) { return _mm512_sqrt_ps(x); }
QUIRE_INLINE Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
QUIRE_INLINE Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
QUIRE_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
QUIRE_INLINE Floats round_to_integer(Floats x) { return _mm512_roundscale_ps(x, 0); }
QUIRE_INLINE float sum(Floats x) { return _mm512_reduce_add_ps(x); }
QUIRE_INLINE float largest(Floats x) { return _mm512_reduce_max_ps(x); }
QUIRE_INLINE Ints bits(Floats x) { return _mm512_castps_si512(x); }
QUIRE_INLINE Floats floats(Ints x) { return _mm512_castsi512_ps(x); }
QUIRE_INLINE Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
QUIRE_INLINE Ints to_ints(Floats x) { return _mm512_cvtps_epi32(x); }
QUIRE_INLINE Ints zero_ints() { return _mm512_setzero_si512(); }
QUIRE_INLINE Ints broadcast_int(int32_t x) { return _mm512_set1_epi32(x); }
QUIRE_INLINE Ints load_ints(const void* p) { return _mm512_loadu_si512(p); }
QUIRE_INLINE void store_ints(void* p, Ints x) { _mm512_storeu_si512(p, x); }
QUIRE_INLINE Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
QUIRE_INLINE Ints sub_ints(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
QUIRE_INLINE Ints and_ints(Ints a, Ints b) { return _mm512_and_si512(a, b); }
QUIRE_INLINE Ints xor_ints(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
template <int N> QUIRE_INLINE Ints shift_left(Ints x) { return _mm512_slli_epi32(x, N); }
template <int N> QUIRE_INLINE Ints shift_right(Ints x) { return _mm512_srli_epi32(x, N); }
template <int N> QUIRE_INLINE Ints shift_right_signed(Ints x) { return _mm512_srai_epi32(x, N); }
QUIRE_INLINE Ints mul_ints(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
// `count` lanes of memory, the rest zero; count is at most WIDTH.
QUIRE_INLINE __mmask16 first_lanes(int count) { return static_cast<__mmask16>((1u << count) - 1u); }
QUIRE_INLINE Floats load_first(const float* p, int count) { return _mm512_maskz_loadu_ps(first_lanes(count), p); }
QUIRE_INLINE void store_first(float* p, Floats x, int count) { _mm512_mask_storeu_ps(p, first_lanes(count), x); }
QUIRE_INLINE Ints load_ints_first(const void* p, int count) { return _mm512_maskz_loadu_epi32(first_lanes(count), p); }
// `count` lanes of x, the others from `rest`.
QUIRE_INLINE Floats keep_first(Floats x, int count, Floats rest) { return _mm512_mask_mov_ps(rest, first_lanes(count), x); }

QUIRE_INLINE Floats load_bf16(const uint16_t* p) {
  return floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
QUIRE_INLINE __m256i narrowed_to_bf16(Floats x) {
#if defined(QUIRE_AVX512_BF16)
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  Ints i = bits(x);
  Ints odd = _mm512_and_si512(_mm512_srli_epi32(i, 16), _mm512_set1_epi32(1));
  Ints rounded = _mm512_add_epi32(i, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_or_si512(i, _mm512_set1_epi32(0x400000)));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}
QUIRE_INLINE void store_bf16(uint16_t* p, Floats x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrowed_to_bf16(x));
}
QUIRE_INLINE void store_bf16_first(uint16_t* p, Floats x, int count) {
  _mm256_mask_storeu_epi16(p, first_lanes(count), narrowed_to_bf16(x));
}
QUIRE_INLINE Floats load_bf16_first(const uint16_t* p, int count) {
  return floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(count), p)), 16));
}

QUIRE_INLINE Floats dot_bf16(Floats sum, Ints a, Ints b) {
#if defined(QUIRE_AVX512_BF16)
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
  const Ints high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  sum = _mm512_fmadd_ps(floats(_mm512_slli_epi32(a, 16)), floats(_mm512_slli_epi32(b, 16)), sum);
  return _mm512_fmadd_ps(floats(_mm512_and_si512(a, high)), floats(_mm512_and_si512(b, high)), sum);
#endif
}
QUIRE_INLINE Ints dot_u8s8(Ints sum, Ints u8, Ints s8) {
#if defined(QUIRE_VNNI)
  // Not the intrinsic: around it GCC 12 copies every sum of a tile to the stack and back, at half the speed.
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(u8), "v"(s8));
  return sum;
#else
  // By parts of 16 bits, as vpmaddubsw would saturate.
  const Ints low = _mm512_set1_epi16(0xff);
  Ints even = _mm512_madd_epi16(_mm512_and_si512(u8, low), _mm512_srai_epi16(_mm512_slli_epi16(s8, 8), 8));
  Ints odd = _mm512_madd_epi16(_mm512_srli_epi16(u8, 8), _mm512_srai_epi16(s8, 8));
  return _mm512_add_epi32(sum, _mm512_add_epi32(even, odd));
#endif
}
QUIRE_INLINE void store_u8(uint8_t* p, Ints x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtusepi32_epi8(x)); }
QUIRE_INLINE Ints dot_u4s8(Ints sum, Ints u4, Ints s8) {
#if defined(QUIRE_VNNI)
  return dot_u8s8(sum, u4, s8);
#else
  return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(u4, s8), _mm512_set1_epi16(1)));
#endif
}
QUIRE_INLINE Ints look_up(Ints table, Ints codes) { return _mm512_shuffle_epi8(table, codes); }
QUIRE_INLINE Ints load_table(const uint8_t* p) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
QUIRE_INLINE Floats load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
QUIRE_INLINE Ints load_s8(const int8_t* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
QUIRE_INLINE Ints load_u8(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

QUIRE_INLINE uint32_t lanes_equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
QUIRE_INLINE uint32_t lanes_above(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
QUIRE_INLINE uint32_t lanes_at_least(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
QUIRE_INLINE uint32_t lanes_nan(Floats a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
QUIRE_INLINE uint32_t lanes_equal_ints(Ints a, Ints b) { return _mm512_cmpeq_epi32_mask(a, b); }
QUIRE_INLINE uint32_t lanes_above_ints(Ints a, Ints b) { return _mm512_cmpgt_epi32_mask(a, b); }
// x where `a` is at least `b`, zero elsewhere.
QUIRE_INLINE Floats where_at_least(Floats a, Floats b, Floats x) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), x);
}
// The lower WIDTH bits of `lanes` say which lanes of x stay; the others become -infinity.
QUIRE_INLINE Floats where_lanes(uint32_t lanes, Floats x) {
  return _mm512_mask_mov_ps(broadcast(-INFINITY), static_cast<__mmask16>(lanes), x);
}
// Both halves of the 64-bit products of 32-bit unsigned lanes with one number.
QUIRE_INLINE void multiply_wide(Ints a, uint32_t factor, Ints& low, Ints& high) {
  const Ints f = broadcast_int(static_cast<int32_t>(factor));
  Ints even = _mm512_mul_epu32(a, f);
  Ints odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), f);
  low = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
  high = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
}

// Of each 64 bits, the two numbers of 16 bits in the middle change places.
QUIRE_INLINE Ints swap_middle_words(Ints x) { return _mm512_shufflehi_epi16(_mm512_shufflelo_epi16(x, 0xd8), 0xd8); }
// By 128 bits: the first two numbers of a and b, alternating; and the last two.
QUIRE_INLINE Ints unpack_low(Ints a, Ints b) { return _mm512_unpacklo_epi32(a, b); }
QUIRE_INLINE Ints unpack_high(Ints a, Ints b) { return _mm512_unpackhi_epi32(a, b); }
// A square matrix of 64-bit numbers, transposed.
QUIRE_INLINE void transpose_pairs(Ints (&rows)[8]) {
  Ints halves[8];
  for (int i = 0; i < 8; i += 2) {
    halves[i] = _mm512_unpacklo_epi64(rows[i], rows[i + 1]);
    halves[i + 1] = _mm512_unpackhi_epi64(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 2; i++) {
    const Ints first_low = _mm512_shuffle_i64x2(halves[i], halves[i + 2], 0x44);
    const Ints first_high = _mm512_shuffle_i64x2(halves[i], halves[i + 2], 0xee);
    const Ints last_low = _mm512_shuffle_i64x2(halves[i + 4], halves[i + 6], 0x44);
    const Ints last_high = _mm512_shuffle_i64x2(halves[i + 4], halves[i + 6], 0xee);
    rows[i] = _mm512_shuffle_i64x2(first_low, last_low, 0x88);
    rows[i + 2] = _mm512_shuffle_i64x2(first_low, last_low, 0xdd);
    rows[i + 4] = _mm512_shuffle_i64x2(first_high, last_high, 0x88);
    rows[i + 6] = _mm512_shuffle_i64x2(first_high, last_high, 0xdd);
  }
}

// Signed bytes as numbers of 16 bits: the first, third, … of them; and the others.
QUIRE_INLINE Ints even_bytes(Ints x) { return _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8); }
QUIRE_INLINE Ints odd_bytes(Ints x) { return _mm512_srai_epi16(x, 8); }
QUIRE_INLINE Ints dot_s16(Ints sum, Ints a, Ints b) {
#if defined(QUIRE_VNNI)
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));  // not the intrinsic, as in dot_u8s8
  return sum;
#else
  return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}
// Numbers of 16 bits in the order in which `even_bytes` and `odd_bytes` take those of 32 bits.
QUIRE_INLINE void store_words(int16_t* p, Ints x) {
  const __m256i words = _mm512_cvtsepi32_epi16(x);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8));
}
// Of each 128 bits, a matrix of 4 × 4 bytes, transposed.
QUIRE_INLINE Ints transpose_bytes(Ints x) {
  return _mm512_shuffle_epi8(
      x, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)));
}
// A square matrix of 128-bit numbers, transposed.
QUIRE_INLINE void transpose_quarters(Ints (&rows)[4]) {
  const Ints a = _mm512_shuffle_i64x2(rows[0], rows[1], 0x44), b = _mm512_shuffle_i64x2(rows[0], rows[1], 0xee);
  const Ints c = _mm512_shuffle_i64x2(rows[2], rows[3], 0x44), d = _mm512_shuffle_i64x2(rows[2], rows[3], 0xee);
  rows[0] = _mm512_shuffle_i64x2(a, c, 0x88);
  rows[1] = _mm512_shuffle_i64x2(a, c, 0xdd);
  rows[2] = _mm512_shuffle_i64x2(b, d, 0x88);
  rows[3] = _mm512_shuffle_i64x2(b, d, 0xdd);
}

using Doubles = __m512d;
QUIRE_INLINE Doubles zero_doubles() { return _mm512_setzero_pd(); }
QUIRE_INLINE Doubles add_rounded(Doubles sum, __m256 x, double magic) {
  const Doubles m = _mm512_set1_pd(magic);
  return _mm512_add_pd(sum, _mm512_sub_pd(_mm512_add_pd(_mm512_cvtps_pd(x), m), m));
}
QUIRE_INLINE __m256 low_half(Floats x) { return _mm512_castps512_ps256(x); }
QUIRE_INLINE __m256 high_half(Floats x) { return _mm512_extractf32x8_ps(x, 1); }

#else  // AVX2 with FMA

constexpr int WIDTH = 8;
using Floats = __m256;
using Ints = __m256i;

QUIRE_INLINE Floats zero() { return _mm256_setzero_ps(); }
QUIRE_INLINE Floats broadcast(float x) { return _mm256_set1_ps(x); }
QUIRE_INLINE Floats load(const float* p) { return _mm256_loadu_ps(p); }
QUIRE_INLINE void store(float* p, Floats x) { _mm256_storeu_ps(p, x); }
QUIRE_INLINE Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
QUIRE_INLINE Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
QUIRE_INLINE Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
QUIRE_INLINE Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
QUIRE_INLINE Floats square_root(Floats x) { return _mm256_sqrt_ps(x); }
QUIRE_INLINE Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
QUIRE_INLINE Floats min(Floats a, Floats b) { return _mm256_min_ps(a, b); }
QUIRE_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
QUIRE_INLINE Floats round_to_integer(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
QUIRE_INLINE float sum(Floats x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
QUIRE_INLINE float largest(Floats x) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
QUIRE_INLINE Ints bits(Floats x) { return _mm256_castps_si256(x); }
QUIRE_INLINE Floats floats(Ints x) { return _mm256_castsi256_ps(x); }
QUIRE_INLINE Floats to_floats(Ints x) { return _mm256_cvtepi32_ps(x); }
QUIRE_INLINE Ints to_ints(Floats x) { return _mm256_cvtps_epi32(x); }
QUIRE_INLINE Ints zero_ints() { return _mm256_setzero_si256(); }
QUIRE_INLINE Ints broadcast_int(int32_t x) { return _mm256_set1_epi32(x); }
QUIRE_INLINE Ints load_ints(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
QUIRE_INLINE void store_ints(void* p, Ints x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
QUIRE_INLINE Ints add_ints(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
QUIRE_INLINE Ints sub_ints(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
QUIRE_INLINE Ints and_ints(Ints a, Ints b) { return _mm256_and_si256(a, b); }
QUIRE_INLINE Ints xor_ints(Ints a, Ints b) { return _mm256_xor_si256(a, b); }
template <int N> QUIRE_INLINE Ints shift_left(Ints x) { return _mm256_slli_epi32(x, N); }
template <int N> QUIRE_INLINE Ints shift_right(Ints x) { return _mm256_srli_epi32(x, N); }
template <int N> QUIRE_INLINE Ints shift_right_signed(Ints x) { return _mm256_srai_epi32(x, N); }
QUIRE_INLINE Ints mul_ints(Ints a, Ints b) { return _mm256_mullo_epi32(a, b); }
QUIRE_INLINE Ints first_lanes(int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
QUIRE_INLINE Floats load_first(const float* p, int count) { return _mm256_maskload_ps(p, first_lanes(count)); }
QUIRE_INLINE void store_first(float* p, Floats x, int count) { _mm256_maskstore_ps(p, first_lanes(count), x); }
QUIRE_INLINE Ints load_ints_first(const void* p, int count) {
  return _mm256_maskload_epi32(static_cast<const int*>(p), first_lanes(count));
}
QUIRE_INLINE Floats keep_first(Floats x, int count, Floats rest) {
  return _mm256_blendv_ps(rest, x, floats(first_lanes(count)));
}

QUIRE_INLINE Floats load_bf16(const uint16_t* p) {
  return floats(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
QUIRE_INLINE __m128i narrowed_to_bf16(Floats x) {
  Ints i = bits(x);
  Ints odd = _mm256_and_si256(_mm256_srli_epi32(i, 16), _mm256_set1_epi32(1));
  Ints rounded = _mm256_add_epi32(i, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  Ints nan = bits(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  rounded = _mm256_blendv_epi8(rounded, _mm256_or_si256(i, _mm256_set1_epi32(0x400000)), nan);
  rounded = _mm256_srli_epi32(rounded, 16);
  Ints packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
  return _mm256_castsi256_si128(packed);
}
QUIRE_INLINE void store_bf16(uint16_t* p, Floats x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrowed_to_bf16(x));
}
QUIRE_INLINE void store_bf16_first(uint16_t* p, Floats x, int count) {
  alignas(16) uint16_t lanes[WIDTH];
  store_bf16(lanes, x);
  std::memcpy(p, lanes, static_cast<size_t>(count) * sizeof(uint16_t));
}
QUIRE_INLINE Floats load_bf16_first(const uint16_t* p, int count) {
  alignas(16) uint16_t lanes[WIDTH] = {};
  std::memcpy(lanes, p, static_cast<size_t>(count) * sizeof(uint16_t));
  return load_bf16(lanes);
}

QUIRE_INLINE Floats dot_bf16(Floats sum, Ints a, Ints b) {
  const Ints high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  sum = _mm256_fmadd_ps(floats(_mm256_slli_epi32(a, 16)), floats(_mm256_slli_epi32(b, 16)), sum);
  return _mm256_fmadd_ps(floats(_mm256_and_si256(a, high)), floats(_mm256_and_si256(b, high)), sum);
}
#if defined(QUIRE_VNNI)
QUIRE_INLINE Ints dot_u8s8(Ints sum, Ints u8, Ints s8) {
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(u8), "x"(s8));  // see above
  return sum;
}
QUIRE_INLINE Ints dot_u4s8(Ints sum, Ints u4, Ints s8) { return dot_u8s8(sum, u4, s8); }
#else
QUIRE_INLINE Ints dot_u8s8(Ints sum, Ints u8, Ints s8) {
  const Ints low = _mm256_set1_epi16(0xff);
  Ints even = _mm256_madd_epi16(_mm256_and_si256(u8, low), _mm256_srai_epi16(_mm256_slli_epi16(s8, 8), 8));
  Ints odd = _mm256_madd_epi16(_mm256_srli_epi16(u8, 8), _mm256_srai_epi16(s8, 8));
  return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}
QUIRE_INLINE Ints dot_u4s8(Ints sum, Ints u4, Ints s8) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(u4, s8), _mm256_set1_epi16(1)));
}
#endif
QUIRE_INLINE void store_u8(uint8_t* p, Ints x) {
  Ints words = _mm256_packus_epi32(x, x);
  Ints bytes = _mm256_packus_epi16(words, words);
  int32_t halves[2] = {_mm256_extract_epi32(bytes, 0), _mm256_extract_epi32(bytes, 4)};
  std::memcpy(p, halves, sizeof(halves));
}
QUIRE_INLINE Ints look_up(Ints table, Ints codes) { return _mm256_shuffle_epi8(table, codes); }
QUIRE_INLINE Ints load_table(const uint8_t* p) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
QUIRE_INLINE Floats load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
QUIRE_INLINE Ints load_s8(const int8_t* p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
QUIRE_INLINE Ints load_u8(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }

QUIRE_INLINE uint32_t lanes_of(Floats mask) { return static_cast<uint32_t>(_mm256_movemask_ps(mask)); }
QUIRE_INLINE uint32_t lanes_equal(Floats a, Floats b) { return lanes_of(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)); }
QUIRE_INLINE uint32_t lanes_above(Floats a, Floats b) { return lanes_of(_mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
QUIRE_INLINE uint32_t lanes_at_least(Floats a, Floats b) { return lanes_of(_mm256_cmp_ps(a, b, _CMP_GE_OQ)); }
QUIRE_INLINE uint32_t lanes_nan(Floats a) { return lanes_of(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)); }
QUIRE_INLINE uint32_t lanes_equal_ints(Ints a, Ints b) { return lanes_of(floats(_mm256_cmpeq_epi32(a, b))); }
QUIRE_INLINE uint32_t lanes_above_ints(Ints a, Ints b) { return lanes_of(floats(_mm256_cmpgt_epi32(a, b))); }
QUIRE_INLINE Floats where_at_least(Floats a, Floats b, Floats x) {
  return _mm256_and_ps(x, _mm256_cmp_ps(a, b, _CMP_GE_OQ));
}
QUIRE_INLINE Floats where_lanes(uint32_t lanes, Floats x) {
  const Ints bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const Ints set = _mm256_and_si256(broadcast_int(static_cast<int32_t>(lanes)), bit);
  return _mm256_blendv_ps(broadcast(-INFINITY), x, floats(_mm256_cmpeq_epi32(set, bit)));
}
QUIRE_INLINE void multiply_wide(Ints a, uint32_t factor, Ints& low, Ints& high) {
  const Ints f = broadcast_int(static_cast<int32_t>(factor));
  Ints even = _mm256_mul_epu32(a, f);
  Ints odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), f);
  low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
  high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
}

QUIRE_INLINE Ints swap_middle_words(Ints x) { return _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(x, 0xd8), 0xd8); }
QUIRE_INLINE Ints unpack_low(Ints a, Ints b) { return _mm256_unpacklo_epi32(a, b); }
QUIRE_INLINE Ints unpack_high(Ints a, Ints b) { return _mm256_unpackhi_epi32(a, b); }
QUIRE_INLINE void transpose_pairs(Ints (&rows)[4]) {
  Ints halves[4];
  for (int i = 0; i < 4; i += 2) {
    halves[i] = _mm256_unpacklo_epi64(rows[i], rows[i + 1]);
    halves[i + 1] = _mm256_unpackhi_epi64(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 2; i++) {
    rows[i] = _mm256_permute2x128_si256(halves[i], halves[i + 2], 0x20);
    rows[i + 2] = _mm256_permute2x128_si256(halves[i], halves[i + 2], 0x31);
  }
}

QUIRE_INLINE Ints even_bytes(Ints x) { return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8); }
QUIRE_INLINE Ints odd_bytes(Ints x) { return _mm256_srai_epi16(x, 8); }
QUIRE_INLINE Ints dot_s16(Ints sum, Ints a, Ints b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
QUIRE_INLINE void store_words(int16_t* p, Ints x) {
  const Ints words = _mm256_permute4x64_epi64(_mm256_shufflelo_epi16(_mm256_packs_epi32(x, x), 0xd8), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(words));
}
QUIRE_INLINE Ints transpose_bytes(Ints x) {
  return _mm256_shuffle_epi8(
      x, _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)));
}
QUIRE_INLINE void transpose_quarters(Ints (&rows)[2]) {
  const Ints first = _mm256_permute2x128_si256(rows[0], rows[1], 0x20);
  rows[1] = _mm256_permute2x128_si256(rows[0], rows[1], 0x31);
  rows[0] = first;
}

using Doubles = __m256d;
QUIRE_INLINE Doubles zero_doubles() { return _mm256_setzero_pd(); }
QUIRE_INLINE Doubles add_rounded(Doubles sum, __m128 x, double magic) {
  const Doubles m = _mm256_set1_pd(magic);
  return _mm256_add_pd(sum, _mm256_sub_pd(_mm256_add_pd(_mm256_cvtps_pd(x), m), m));
}
QUIRE_INLINE __m128 low_half(Floats x) { return _mm256_castps256_ps128(x); }
QUIRE_INLINE __m128 high_half(Floats x) { return _mm256_extractf128_ps(x, 1); }

#endif

QUIRE_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
// To the second-level cache alone.
QUIRE_INLINE void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
QUIRE_INLINE Ints broadcast_four(const void* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return broadcast_int(four);
}
// The same by the type of what is in memory.
QUIRE_INLINE Floats load(const uint16_t* p) { return load_bf16(p); }
QUIRE_INLINE Floats load_first(const uint16_t* p, int count) { return load_bf16_first(p, count); }
QUIRE_INLINE void store(uint16_t* p, Floats x) { store_bf16(p, x); }
QUIRE_INLINE void store_first(uint16_t* p, Floats x, int count) { store_bf16_first(p, x, count); }
// The same of a row that has `count` elements left, be they more than WIDTH or less.
template <typename Element>
QUIRE_INLINE Floats load_up_to(const Element* p, int64_t count) {
  return count >= WIDTH ? load(p) : load_first(p, static_cast<int>(count));
}
template <typename Element>
QUIRE_INLINE void store_up_to(Element* p, Floats x, int64_t count) {
  count >= WIDTH ? store(p, x) : store_first(p, x, static_cast<int>(count));
}

// Adds up lanes that lie in 0 … 1 without any rounding: each is first rounded to a multiple of 2^-33, which is what a
// float64 between 2^19 and 2^20 can hold, so up to 2^20 of them have one sum, in whatever order they come.
constexpr double EXACT_GRID = 3.0 * (1 << 18);
QUIRE_INLINE double exactly(float x) { return (static_cast<double>(x) + EXACT_GRID) - EXACT_GRID; }
QUIRE_INLINE Doubles add_exactly(Doubles sum, Floats x) {
  return add_rounded(add_rounded(sum, low_half(x), EXACT_GRID), high_half(x), EXACT_GRID);
}
QUIRE_INLINE double sum(Doubles x) {
  double lanes[sizeof(Doubles) / sizeof(double)], total = 0;
  std::memcpy(lanes, &x, sizeof(x));
  for (double lane : lanes) total += lane;
  return total;
}

// exp(x) within 2 units in the last place: 2^n · 2^f with |f| <= 1/2, and a polynomial for 2^f (Cody & Waite 1980).
// Below -87 the result is 0, so that a masked score of -infinity weighs nothing.
QUIRE_INLINE Floats exponential(Floats x) {
  const Floats lowest = broadcast(-87.0f);
  Floats clamped = min(max(x, lowest), broadcast(88.0f));
  Floats n = round_to_integer(mul(clamped, broadcast(1.44269504f)));
  Floats r = multiply_add(n, broadcast(-0.693359375f), clamped);
  r = multiply_add(n, broadcast(2.12194440e-4f), r);
  Floats p = broadcast(1.9875691500e-4f);
  p = multiply_add(p, r, broadcast(1.3981999507e-3f));
  p = multiply_add(p, r, broadcast(8.3334519073e-3f));
  p = multiply_add(p, r, broadcast(4.1665795894e-2f));
  p = multiply_add(p, r, broadcast(1.6666665459e-1f));
  p = multiply_add(p, r, broadcast(5.0000001201e-1f));
  p = multiply_add(p, mul(r, r), add(r, broadcast(1.0f)));
#if defined(QUIRE_AVX512)
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, lowest, _CMP_GE_OQ), p, n);
#else
  const Floats result = mul(p, floats(shift_left<23>(add_ints(to_ints(n), broadcast_int(127)))));
  return _mm256_and_ps(result, _mm256_cmp_ps(x, lowest, _CMP_GE_OQ));
#endif
}

// tanh(x) within 2 units in the last place: a polynomial near 0, where 1 - 2 / (exp(2x) + 1) would cancel (Cephes).
QUIRE_INLINE Floats hyperbolic_tangent(Floats x) {
  const Floats size = floats(and_ints(bits(x), broadcast_int(0x7fffffff)));
  const Floats one = broadcast(1.0f), sign = floats(xor_ints(bits(x), bits(size)));
  const Floats rest = div(broadcast(2.0f), add(exponential(add(size, size)), one));
  const Floats far = floats(xor_ints(bits(sub(one, rest)), bits(sign)));
  const Floats square = mul(x, x);
  Floats p = broadcast(-5.70498872745e-3f);
  p = multiply_add(p, square, broadcast(2.06390887954e-2f));
  p = multiply_add(p, square, broadcast(-5.37397155531e-2f));
  p = multiply_add(p, square, broadcast(1.33314422036e-1f));
  p = multiply_add(p, square, broadcast(-3.33332819422e-1f));
  const Floats near = multiply_add(mul(p, square), x, x);
#if defined(QUIRE_AVX512)
  return _mm512_mask_mov_ps(near, _mm512_cmp_ps_mask(size, broadcast(0.625f), _CMP_GE_OQ), far);
#else
  return _mm256_blendv_ps(near, far, _mm256_cmp_ps(size, broadcast(0.625f), _CMP_GE_OQ));
#endif
}

// log(x) of positive normal numbers, within 2 units in the last place: n · log 2 + log(m), with m between √½ and √2 and
// a polynomial in m - 1 (Cephes). Every product that is added to something is written as a fused multiply-add, so that
// no compiler has a choice: the bits are the same on every instruction set.
QUIRE_INLINE Floats logarithm(Floats x) {
  const Ints half_root = broadcast_int(0x3f3504f3);  // √½
  Ints shifted = add_ints(sub_ints(bits(x), half_root), broadcast_int(127 << 23));
  Ints exponent = sub_ints(shift_right<23>(shifted), broadcast_int(127));
  Floats n = to_floats(exponent);
  Floats f = sub(floats(sub_ints(bits(x), shift_left<23>(exponent))), broadcast(1.0f));
  Floats square = mul(f, f);
  Floats p = broadcast(7.0376836292e-2f);
  p = multiply_add(p, f, broadcast(-1.1514610310e-1f));
  p = multiply_add(p, f, broadcast(1.1676998740e-1f));
  p = multiply_add(p, f, broadcast(-1.2420140846e-1f));
  p = multiply_add(p, f, broadcast(1.4249322787e-1f));
  p = multiply_add(p, f, broadcast(-1.6668057665e-1f));
  p = multiply_add(p, f, broadcast(2.0000714765e-1f));
  p = multiply_add(p, f, broadcast(-2.4999993993e-1f));
  p = multiply_add(p, f, broadcast(3.3333331174e-1f));
  Floats y = multiply_add(mul(p, f), square, mul(n, broadcast(-2.12194440e-4f)));
  y = multiply_add(square, broadcast(-0.5f), y);
  return multiply_add(n, broadcast(0.693359375f), add(f, y));
}

// log(1 + exp(x)) within 1e-6 of itself, and 0 where x is below -87: with u = exp(-|x|), log(1 + u) is 2 · artanh(z) with
// z = u / (2 + u), a series in z², which is at most 1/9. A NaN stays one.
QUIRE_INLINE Floats softplus(Floats x) {
  const Floats u = exponential(sub(zero(), floats(and_ints(bits(x), broadcast_int(0x7fffffff)))));
  const Floats z = div(u, add(u, broadcast(2.0f))), square = mul(z, z);
  Floats p = broadcast(1.0f / 15.0f);
  p = multiply_add(p, square, broadcast(1.0f / 13.0f));
  p = multiply_add(p, square, broadcast(1.0f / 11.0f));
  p = multiply_add(p, square, broadcast(1.0f / 9.0f));
  p = multiply_add(p, square, broadcast(1.0f / 7.0f));
  p = multiply_add(p, square, broadcast(1.0f / 5.0f));
  p = multiply_add(p, square, broadcast(1.0f / 3.0f));
  p = multiply_add(p, square, broadcast(1.0f));
  return multiply_add(add(z, z), p, max(zero(), x));
}

QUIRE_INLINE Floats sigmoid(Floats x) { return div(broadcast(1.0f), add(broadcast(1.0f), exponential(sub(zero(), x)))); }

QUIRE_INLINE Floats silu(Floats x) { return div(x, add(broadcast(1.0f), exponential(sub(zero(), x)))); }

// x / 2 · (1 + tanh(u)) with u = √(2/π) · (x + 0.044715 x³), written as x / (1 + exp(-2u)), which cancels nowhere.
QUIRE_INLINE Floats gelu_tanh(Floats x) {
  const Floats cubic = multiply_add(mul(mul(x, x), x), broadcast(0.044715f), x);
  return div(x, add(broadcast(1.0f), exponential(mul(cubic, broadcast(-1.5957691216f)))));
}

// x · Φ(x) within 1.2e-6. Between -5.2 and 5.2, Φ(x) is ½ + x · P(x²) with a polynomial that is fitted to least error (its
// variable, x² on a scale of -1 … 1, keeps its terms small); beyond, Φ is as at these ends. A NaN stays one.
QUIRE_INLINE Floats gelu(Floats x) {
  const Floats above = max(broadcast(-5.2f), x), inside = min(broadcast(5.2f), above);
  const Floats u = multiply_add(mul(inside, inside), broadcast(2.0f / (5.2f * 5.2f)), broadcast(-1.0f));
  Floats p = broadcast(8.587525808e-04f);
  p = multiply_add(p, u, broadcast(-2.503700554e-03f));
  p = multiply_add(p, u, broadcast(2.853642683e-03f));
  p = multiply_add(p, u, broadcast(-3.505754285e-03f));
  p = multiply_add(p, u, broadcast(7.557805162e-03f));
  p = multiply_add(p, u, broadcast(-1.310331002e-02f));
  p = multiply_add(p, u, broadcast(1.838717237e-02f));
  p = multiply_add(p, u, broadcast(-2.459341846e-02f));
  p = multiply_add(p, u, broadcast(3.190726042e-02f));
  p = multiply_add(p, u, broadcast(-3.994129971e-02f));
  p = multiply_add(p, u, broadcast(5.003016815e-02f));
  p = multiply_add(p, u, broadcast(-6.774340570e-02f));
  p = multiply_add(p, u, broadcast(1.359499395e-01f));
  return mul(above, multiply_add(inside, p, broadcast(0.5f)));
}

template <Activation ACTIVATION>
QUIRE_INLINE Floats activated(Floats x) {
  if constexpr (ACTIVATION == GELU_TANH) return gelu_tanh(x);
  if constexpr (ACTIVATION == GELU) return gelu(x);
  if constexpr (ACTIVATION == RELU2) {
    const Floats above = max(zero(), x);  // a NaN stays one
    return mul(above, above);
  }
  return silu(x);
}

// gpt-oss: (up + 1) · gate · sigmoid(1.702 gate) of what both are where they are cut off; a NaN stays one.
QUIRE_INLINE Floats clamped_swiglu(Floats gate, Floats up) {
  const Floats limit = broadcast(7.0f), one = broadcast(1.0f);
  gate = min(limit, gate);
  up = max(broadcast(-7.0f), min(limit, up));
  return mul(add(up, one), div(gate, add(one, exponential(mul(gate, broadcast(-1.702f))))));
}

template <Activation ACTIVATION>
QUIRE_INLINE Floats gated(Floats gate, Floats up) {
  if constexpr (ACTIVATION == SWIGLUOAI) return clamped_swiglu(gate, up);
  if constexpr (ACTIVATION == NO_ACTIVATION) return mul(gate, up);
  if constexpr (ACTIVATION == SIGMOID) return div(up, add(broadcast(1.0f), exponential(sub(zero(), gate))));
  return mul(activated<ACTIVATION>(gate), up);
}
