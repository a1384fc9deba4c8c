/* BiClip in bf16 by hand: update and counts from the same registers. clip.c includes this once per width of a register.
 *
 * A 32-bit word holds two elements, which become floats by a shift and a mask and are rounded back into one word; nothing
 * crosses lanes. Counting needs no floats: the bits of magnitudes are in the order of the magnitudes, so 16 bits of each are
 * compared with thresholds cut to 16 bits. A lane sees at most UNIT / 16 elements, and 16 bits are enough to count them.
 *
 * WIDTH: bits of a register, 256 or 512.
 */
#if WIDTH == 512
#define TARGET "avx512f,avx512bw,avx512dq,avx512vl,fma,avx2"
#define NAME(X) X##_512
#define AHEAD AHEAD_AVX512
#define FLOATS __m512
#define DOUBLES __m512d
#define WORDS __m512i
#define PS(OP) _mm512_##OP##_ps
#define PD(OP) _mm512_##OP##_pd
#define EPI32(OP) _mm512_##OP##_epi32
#define EPI16(OP) _mm512_##OP##_epi16
#define BITS(OP) _mm512_##OP##_si512
#define AS_FLOATS _mm512_castsi512_ps
#define AS_WORDS _mm512_castps_si512
#define LOWER _mm512_castps512_ps256
#define UPPER(X) _mm512_extractf32x8_ps(X, 1)
#define LOAD(X) _mm512_loadu_si512(X)
#define STORE(X, V) _mm512_storeu_si512(X, V)
#define ZERO_UP_TO(T, A, X) _mm512_maskz_mov_epi32(_mm512_cmp_ps_mask(A, T, _CMP_NLE_UQ), X) /* X, and 0 where A <= T */
#define COUNT_ABOVE(SUM, A, T) _mm512_mask_sub_epi16(SUM, _mm512_cmpgt_epi16_mask(A, T), SUM, _mm512_set1_epi16(-1))
#else
#define TARGET "avx2,fma"
#define NAME(X) X##_256
#define AHEAD AHEAD_AVX2
#define FLOATS __m256
#define DOUBLES __m256d
#define WORDS __m256i
#define PS(OP) _mm256_##OP##_ps
#define PD(OP) _mm256_##OP##_pd
#define EPI32(OP) _mm256_##OP##_epi32
#define EPI16(OP) _mm256_##OP##_epi16
#define BITS(OP) _mm256_##OP##_si256
#define AS_FLOATS _mm256_castsi256_ps
#define AS_WORDS _mm256_castps_si256
#define LOWER _mm256_castps256_ps128
#define UPPER(X) _mm256_extractf128_ps(X, 1)
#define LOAD(X) _mm256_loadu_si256((const void *)(X))
#define STORE(X, V) _mm256_storeu_si256((void *)(X), V)
#define ZERO_UP_TO(T, A, X) _mm256_andnot_si256(_mm256_castps_si256(_mm256_cmp_ps(A, T, _CMP_LE_OQ)), X)
#define COUNT_ABOVE(SUM, A, T) _mm256_sub_epi16(SUM, _mm256_cmpgt_epi16(A, T))
#endif
#define FN __attribute__((target(TARGET), always_inline)) static inline

typedef struct { FLOATS u, d, dead, neg_lr, decay; } NAME(Numbers);
typedef struct { WORDS dead, low, high; } NAME(Thresholds);
typedef struct {
    WORDS dead, low, high, largest; /* how many magnitudes are above each threshold, and the largest; in 16 bits */
    DOUBLES even[2], odd[2];        /* sums of squares in lanes 0 2 .. 14 and 1 3 .. 15 */
} NAME(Totals);

/* The new value of one half of the words, as the upper half of each word. */
FN WORDS NAME(step)(WORDS p, WORDS g, const NAME(Numbers) *k, const int plain, const int maximize) {
    const WORDS sign = EPI32(set1)((int)0x80000000u);
    const FLOATS a = AS_FLOATS(BITS(andnot)(sign, g));
    FLOATS y = AS_FLOATS(p);
    WORDS c = AS_WORDS(PS(min)(k->u, PS(max)(k->d, a))); /* data second: NaN stays */
    c = BITS(or)(c, maximize ? BITS(andnot)(g, sign) : BITS(and)(g, sign));
    c = ZERO_UP_TO(k->dead, a, c);
    if (!plain) y = PS(mul)(y, k->decay);
    const WORDS b = AS_WORDS(PS(fmadd)(k->neg_lr, AS_FLOATS(c), y));
    return EPI32(add)(b, EPI32(add)(EPI32(set1)(0x7fff), BITS(and)(EPI32(srli)(b, 16), EPI32(set1)(1)))); /* bf16_round */
}

FN void NAME(add_squares)(FLOATS x, DOUBLES *sum) {
    const DOUBLES low = PD(cvtps)(LOWER(x)), high = PD(cvtps)(UPPER(x));
    DOUBLES *const second = WIDTH == 512 ? sum : sum + 1; /* 8 lanes: one register or two */
    *sum = PD(fmadd)(low, low, *sum);
    *second = PD(fmadd)(high, high, *second);
}

FN void NAME(count)(WORDS g, WORDS even, WORDS odd, const NAME(Thresholds) *k, NAME(Totals) *t) {
    const WORDS magnitude = BITS(and)(g, EPI32(set1)(0x7fff7fff));
    t->dead = COUNT_ABOVE(t->dead, magnitude, k->dead);
    t->low = COUNT_ABOVE(t->low, magnitude, k->low);
    t->high = COUNT_ABOVE(t->high, magnitude, k->high);
    t->largest = EPI16(max)(t->largest, magnitude);
    NAME(add_squares)(AS_FLOATS(even), t->even);
    NAME(add_squares)(AS_FLOATS(odd), t->odd);
}

/* Add the totals of `elements` elements; whether all of them were finite. */
FN int NAME(add_totals)(const NAME(Totals) *t, int64_t elements, Counters *counters, double *lane) {
    uint16_t dead[WIDTH / 16], low[WIDTH / 16], high[WIDTH / 16], largest[WIDTH / 16], top = 0;
    double even[2 * WIDTH / 64], odd[2 * WIDTH / 64];
    STORE(dead, t->dead), STORE(low, t->low), STORE(high, t->high), STORE(largest, t->largest);
    for (int i = 0; i < 2; i++) PD(storeu)(even + i * WIDTH / 64, t->even[i]), PD(storeu)(odd + i * WIDTH / 64, t->odd[i]);
    for (int j = 0; j < BF16_LANES; j++) lane[j] = j % 2 ? odd[j / 2] : even[j / 2];
    counters->elements += elements, counters->zero += elements;
    for (int j = 0; j < WIDTH / 16; j++) {
        counters->zero -= dead[j], counters->below += dead[j] - low[j], counters->above += high[j];
        top = largest[j] > top ? largest[j] : top;
    }
    counters->largest = from_bits((uint32_t)top << 16);
    return top < 0x7f80;
}

FN void NAME(biclip)(const Unit *w, const int counted, const int plain) {
    const Row_f32 r = row_f32(w->row);
    const float low = r.d > r.dead_zone ? r.d : r.dead_zone;
    const float high = r.u > low ? nextafterf(r.u, 0.0f) : low; /* a > high is a >= u, where that is not below too */
    const NAME(Numbers) k = {PS(set1)(r.u), PS(set1)(r.d), PS(set1)(r.dead_zone), PS(set1)(r.neg_lr), PS(set1)(r.decay)};
    const NAME(Thresholds) of = {EPI16(set1)((short)(to_bits(r.dead_zone) >> 16)), EPI16(set1)((short)(to_bits(low) >> 16)),
                                 EPI16(set1)((short)(to_bits(high) >> 16))};
    const WORDS upper = EPI32(set1)((int)0xffff0000u);
    const int maximize = plain ? 0 : r.maximize;
    const int64_t at_once = WIDTH / 16, block = STRIDE * LINE / 2, full = w->count / at_once * at_once;
    NAME(Totals) totals = {0};
    uint16_t *p = w->p;
    const uint16_t *g = w->g;
    float wide[STRIDE * LINE / 2];
    for (int64_t at = 0; at < w->count; at += block) {
        const int64_t end = at + block < full ? at + block : full;
        if (at % (PAGE / 2) == 0) next_page((const char *)(g + at)), next_page((const char *)(p + at));
        for (int64_t i = at; i < end; i += at_once) {
            if (i % (LINE / 2) == 0) {
                _mm_prefetch((const char *)(g + i) + AHEAD, _MM_HINT_NTA); /* read once: leave the caches to p */
                _mm_prefetch((const char *)(p + i) + AHEAD, _MM_HINT_T0);
            }
            const WORDS ps = LOAD(p + i), gs = LOAD(g + i), even = EPI32(slli)(gs, 16), odd = BITS(and)(gs, upper);
            const WORDS p_even = NAME(step)(EPI32(slli)(ps, 16), even, &k, plain, maximize);
            const WORDS p_odd = NAME(step)(BITS(and)(ps, upper), odd, &k, plain, maximize);
            STORE(p + i, BITS(or)(EPI32(srli)(p_even, 16), BITS(and)(p_odd, upper)));
            if (counted) NAME(count)(gs, even, odd, &of, &totals);
        }
        if (w->bins) sample(w, at, w->count - at < block ? w->count - at : block, wide);
    }
    biclip_run_bf16(p + full, g + full, w->count - full, w->row);
    if (!counted) return;
    double lane[BF16_LANES];
    Counters *t = w->counters, whole = {0};
    const int finite = NAME(add_totals)(&totals, full, t, lane);
    widen(BF16, (const char *)(g + full), w->count - full, wide);
    count_f32(wide, w->count - full, w->row, t, lane, BF16_LANES);
    if (!finite) { /* rare: count again, finite elements only */
        memset(lane, 0, sizeof lane);
        for (int64_t at = 0; at < w->count; at += block) {
            const int64_t n = w->count - at < block ? w->count - at : block;
            widen(BF16, (const char *)(g + at), n, wide);
            count_f32(wide, n, w->row, &whole, lane, BF16_LANES);
        }
        *t = whole;
    }
    fold(lane, BF16_LANES, t);
}

__attribute__((target(TARGET))) static void NAME(biclip_bf16)(const Unit *w) {
    const int plain = w->row->decay == 1.0 && w->row->maximize == 0.0;
    if (w->counters) plain ? NAME(biclip)(w, 1, 1) : NAME(biclip)(w, 1, 0);
    else plain ? NAME(biclip)(w, 0, 1) : NAME(biclip)(w, 0, 0);
}

#undef WIDTH
#undef TARGET
#undef NAME
#undef AHEAD
#undef FLOATS
#undef DOUBLES
#undef WORDS
#undef PS
#undef PD
#undef EPI32
#undef EPI16
#undef BITS
#undef AS_FLOATS
#undef AS_WORDS
#undef LOWER
#undef UPPER
#undef LOAD
#undef STORE
#undef ZERO_UP_TO
#undef COUNT_ABOVE
#undef FN
