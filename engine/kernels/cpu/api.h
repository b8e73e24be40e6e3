/* The C interface of the CPU kernels, loaded by engine/kernels/cpu/library.py.
 *
 * All pointers are the caller's and are only read during the call, except where "out" says so.
 * Functions that can fail return 0 or a negative paceline_error.
 */
#ifndef PACELINE_API_H
#define PACELINE_API_H

#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(default)
#ifdef __cplusplus
extern "C" {
#endif

enum paceline_error {
  PACELINE_BAD_SHAPE = -1,  /* a dimension the kernels do not support, or a size mismatch */
  PACELINE_BAD_BATCH = -2,  /* a token, position, row bound or block id out of range */
  PACELINE_NO_MEMORY = -3,
  PACELINE_INCOMPLETE = -4  /* a weight of the model was never set */
};

/* A model whose embedding and head are one matrix sets the head alone. */
enum paceline_linear { PACELINE_Q, PACELINE_K, PACELINE_V, PACELINE_O, PACELINE_GATE, PACELINE_UP,
                       PACELINE_DOWN, PACELINE_EMBEDDING, PACELINE_HEAD };
enum paceline_norm { PACELINE_ATTENTION_NORM, PACELINE_MLP_NORM, PACELINE_Q_NORM, PACELINE_K_NORM,
                     PACELINE_FINAL_NORM };

typedef struct {
  int32_t hidden, intermediate, num_layers, num_heads, num_kv_heads, head_dim, vocab;
  int32_t max_positions;   /* rows of the rope tables */
  int32_t rotary_dim;      /* leading dims of a head that rotate: head_dim, or less */
  int32_t dense;           /* 1: fp32, fp16 or bf16 weights, fp32 activations; 0: quantised */
  int32_t kv_kind;         /* KV in 0: fp32; 1: int16; 2: int8; integers have a scale a position and head */
  int32_t num_blocks, block_size;
  int32_t max_tokens;      /* of a step */
  int32_t num_threads;
  float norm_eps;
  uint64_t weight_bytes;   /* sum of paceline_packed_bytes over all weight matrices */
} paceline_config;

/* One step. Row i is tokens row_starts[i] .. row_starts[i + 1] - 1, of one sequence and in
 * ascending positions; its block table is block_tables + i * table_stride. Outputs are the tokens
 * whose hidden states are asked for, in ascending order and at least one where there are tokens. */
typedef struct {
  int32_t num_tokens, num_rows, table_stride, num_outputs;
  const int32_t* token_ids;    /* [num_tokens] */
  const int32_t* positions;    /* [num_tokens] */
  const int32_t* row_starts;   /* [num_rows + 1] */
  const int32_t* block_tables; /* [num_rows][table_stride] */
  const int32_t* outputs;      /* [num_outputs] */
} paceline_batch;

/* How a row's token is chosen: the beginning of a row of engine.sampler.SLOT_COLUMNS. The rules are
 * engine/draw.py's. top_k outside 1 .. vocab - 1, top_p >= 1 and min_p <= 0 filter nothing. */
typedef struct {
  int64_t seed, top_k, num_logprobs; /* num_logprobs: -1 = none, else how many alternatives */
  double top_p;
  float temperature, min_p;
  uint8_t greedy;
} paceline_parameters;

/* Row i of the logits is logits + i * stride; tokens from vocab on do not exist. Log-probabilities
 * are those at temperature 1; rows without any are left alone. A row with a nan, an infinity or no
 * token at all has a peak that is not finite, and any token. A row with a mask is changed: to tokens
 * whose bit is 0, the lowest of a word first, -inf is added. */
typedef struct {
  float* logits;
  int64_t stride;
  int32_t rows, vocab;
  const uint32_t* masks;    /* [num_masks][mask_words] */
  const int32_t* mask_rows; /* null; or [rows] of the row's mask, -1 = it has none */
  int32_t num_masks, mask_words; /* mask_words: at least vocab / 32, rounded up */
  const void* parameters; /* [rows] paceline_parameters, parameter_bytes apart */
  int64_t parameter_bytes;
  const int64_t* indices; /* [rows] of the uniform number of the seed, see engine/random.py */
  const int64_t* given;   /* null; or [rows]: the tokens, for their log-probabilities alone */
  int64_t* tokens;        /* out [rows] */
  float* peaks;           /* out [rows] the best logit */
  float* logprobs;        /* out [rows] of the token */
  float* top;             /* out [rows][max_top] of the best tokens, best first */
  int64_t* top_ids;       /* out [rows][max_top] */
  int32_t max_top;        /* at least min(num_logprobs, vocab) of every row */
} paceline_choice;

typedef struct paceline_model paceline_model;

/* Change it with anything in this file: library.py loads no library of another number. */
#define PACELINE_ABI 10
int32_t paceline_abi(void);

const char* paceline_tier(void);                /* the tier this library was compiled for */
int32_t paceline_tier_runs(const char* tier);   /* 1 if this CPU can run that tier */
uint64_t paceline_packed_bytes(int32_t kind, int32_t n, int32_t k);

/* rope_cos, rope_sin: [max_positions][rotary_dim / 2]. layer_windows: [num_layers] positions that a
 * query sees, itself included; 0 = all. Returns null when the configuration is not supported or
 * memory is short (error says which). */
paceline_model* paceline_create(const paceline_config* config, const float* rope_cos,
                                const float* rope_sin, const int32_t* layer_windows,
                                int32_t* error);
void paceline_destroy(paceline_model* model);

/* weight: n rows of k values, as a GGUF file or an array has them, row_bytes apart. bias: [n] or
 * null. layer is ignored for embedding and head; a head that is never set is the embedding. */
int32_t paceline_set_linear(paceline_model* model, int32_t layer, int32_t which, int32_t kind,
                            int32_t n, int32_t k, const void* weight, uint64_t row_bytes,
                            const float* bias);
int32_t paceline_set_norm(paceline_model* model, int32_t layer, int32_t which, const float* weight);

/* Runs a step: stores the KV of all tokens. out: hidden states of the outputs after the final norm,
 * [num_outputs][hidden]; a token whose computation met a nan or an infinity has nans there, no other
 * has. */
int32_t paceline_forward(paceline_model* model, const paceline_batch* batch, float* hidden);
/* hidden: [rows][hidden] from a step. out: logits [rows][vocab]. */
int32_t paceline_logits(paceline_model* model, const float* hidden, int32_t rows, float* logits);
int32_t paceline_choose(paceline_model* model, const paceline_choice* choice);
/* Copies whole blocks: pairs is [num_pairs][2], source then target, in order. */
int32_t paceline_copy_blocks(paceline_model* model, const int32_t* pairs, int32_t num_pairs);
/* out: nanoseconds by kind of phase since the last call, then zeroes them:
 * embed, norm, qkv, rope, attention, output, mlp, down, head. */
void paceline_profile(paceline_model* model, uint64_t out[9]);

/* Single kernels, for tests and measurement. */
int32_t paceline_multiply(int32_t kind, int32_t n, int32_t k, const void* weight, uint64_t row_bytes,
                          const float* bias, int32_t rows, const float* x, float* out);
int32_t paceline_attend(int32_t kv_kind, int32_t block_size, int32_t num_blocks, int32_t kv_heads,
                        int32_t group, int32_t head_dim, int32_t num_keys, const float* keys,
                        const float* values, const int32_t* block_table, int32_t num_queries,
                        const float* queries, const int32_t* first, const int32_t* last, float* out);
int32_t paceline_choose_alone(int32_t num_threads, const paceline_choice* choice);
/* How many a second this machine can do at most, on so many threads: bytes read from memory, products
 * of 8-bit and of 16-bit integers added to sums, fp32 products added to sums. About a second's work. */
enum paceline_limit { PACELINE_READ_BYTES, PACELINE_INT8_PRODUCTS, PACELINE_INT16_PRODUCTS,
                      PACELINE_FP32_PRODUCTS };
double paceline_limit(int32_t what, int32_t num_threads);
void paceline_exp(const float* x, float* out, int32_t count);
void paceline_widen_half(const uint16_t* x, float* out, int32_t count);

#ifdef __cplusplus
}
#endif
#pragma GCC visibility pop
#endif
