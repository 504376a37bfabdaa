// Runs llama.cpp's image encoder: `encode MMPROJ PIXELS OUT WIDTH HEIGHT`. PIXELS: normalised float32
// [height][width][3]. OUT: the embeddings of the image tokens, float32.
#include <fstream>
#include <vector>

#include "clip-impl.h"
#include "clip.h"

int main(int, char** argv) {
    clip_context_params params = {};
    params.flash_attn_type = CLIP_FLASH_ATTN_TYPE_DISABLED;
    params.image_min_tokens = params.image_max_tokens = -1;
    clip_ctx* encoder = clip_init(argv[1], params).ctx_v;
    if (!encoder) return 1;
    clip_image_f32 image;
    image.set_size({std::atoi(argv[4]), std::atoi(argv[5])}, false, false);
    std::vector<float> pixels(image.n_elements()), out;
    std::ifstream(argv[2], std::ios::binary).read(reinterpret_cast<char*>(pixels.data()), pixels.size() * 4);
    image.cpy_buf(pixels);
    out.resize(size_t(clip_n_output_tokens(encoder, &image)) * clip_n_mmproj_embd(encoder));
    if (!clip_image_encode(encoder, 1, &image, out)) return 1;
    std::ofstream(argv[3], std::ios::binary).write(reinterpret_cast<char*>(out.data()), out.size() * 4);
    clip_free(encoder);
}
