// mix_row.cu as a CPU library.
#include "mix_row.cu"

extern "C" int threads() { return kThreads; }
extern "C" void run(const Params* params, int num_blocks, int shared_bytes) {
    cpu::run(mix_row, *params, num_blocks, kThreads, shared_bytes);
}
