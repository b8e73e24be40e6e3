// Attention over each kind of KV, compiled once for all who call it.
#include "attention.h"

namespace paceline {

template void attend(const QueryRow*, int, const HeadKv<float>&, const AttentionScratch&,
                     const Fetch&);
template void attend(const QueryRow*, int, const HeadKv<int16_t>&, const AttentionScratch&,
                     const Fetch&);
template void attend(const QueryRow*, int, const HeadKv<int8_t>&, const AttentionScratch&,
                     const Fetch&);

}  // namespace paceline
