// The C interface: argument checks at the border, then the classes behind it.
#include "api.h"

#include <exception>
#include <string>

#include "model.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

using namespace paceline;

struct paceline_model : Model {
  using Model::Model;
};

namespace {

bool known(int32_t kind) { return kind >= 0 && kind <= static_cast<int32_t>(Kind::kBF16); }

Linear shape_of(int32_t kind, int32_t n, int32_t k) {
  Linear w;
  w.kind = static_cast<Kind>(kind);
  w.n = n;
  w.k = k;
  return w;
}

}  // namespace

extern "C" {

int32_t paceline_abi(void) { return PACELINE_ABI; }

const char* paceline_tier(void) { return PACELINE_TIER; }

int32_t paceline_tier_runs(const char* tier) {
  const std::string name(tier);
  if (name == "generic") return 1;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  if (name == "avx2") return avx2;
  if (name == "avxvnni") return avx2 && __builtin_cpu_supports("avxvnni");
  if (name == "avx512vnni")
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
#elif defined(__aarch64__) && defined(__APPLE__)
  if (name == "neon") return 1;  // every such Mac has dot products
#elif defined(__aarch64__) && defined(__linux__)
  if (name == "neon") return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#endif
  return 0;
}

uint64_t paceline_packed_bytes(int32_t kind, int32_t n, int32_t k) {
  const Linear w = shape_of(kind, n, k);
  return w.tile_bytes() * static_cast<uint64_t>(w.num_tiles());
}

paceline_model* paceline_create(const paceline_config* config, const float* rope_cos,
                                const float* rope_sin, const int32_t* layer_windows,
                                int32_t* error) {
  *error = PACELINE_BAD_SHAPE;
  if (!Model::supported(*config)) return nullptr;
  *error = PACELINE_NO_MEMORY;
  try {
    auto model = std::make_unique<paceline_model>(*config, rope_cos, rope_sin, layer_windows);
    if (!model->allocate()) return nullptr;
    *error = 0;
    return model.release();
  } catch (const std::exception&) {  // memory or threads
    return nullptr;
  }
}

void paceline_destroy(paceline_model* model) { delete model; }

int32_t paceline_set_linear(paceline_model* model, int32_t layer, int32_t which, int32_t kind,
                            int32_t n, int32_t k, const void* weight, uint64_t row_bytes,
                            const float* bias) {
  if (!known(kind)) return PACELINE_BAD_SHAPE;
  return model->set_linear(layer, which, static_cast<Kind>(kind), n, k,
                           static_cast<const uint8_t*>(weight), row_bytes, bias);
}

int32_t paceline_set_norm(paceline_model* model, int32_t layer, int32_t which,
                          const float* weight) {
  return model->set_norm(layer, which, weight);
}

int32_t paceline_forward(paceline_model* model, const paceline_batch* batch, float* hidden) {
  return model->forward(*batch, hidden);
}

int32_t paceline_logits(paceline_model* model, const float* hidden, int32_t rows, float* logits) {
  return model->logits(hidden, rows, logits);
}

int32_t paceline_choose(paceline_model* model, const paceline_choice* choice) {
  return model->choose(*choice);
}

int32_t paceline_copy_blocks(paceline_model* model, const int32_t* pairs, int32_t num_pairs) {
  return model->copy_blocks(pairs, num_pairs);
}

void paceline_profile(paceline_model* model, uint64_t out[9]) { model->profile(out); }

}  // extern "C"
