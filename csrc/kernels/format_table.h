// Adds the matrix products of every quantised format to a table of kernels. Included inside the namespace of
// an instruction set, after its formats, `linear` and sparse_kernels.h.

template <class Add>
inline void for_formats(Add add) {
#define HOTSET_TYPE(name, id, block_size, block_bytes) add.template operator()<Format<Type::name>>();
    HOTSET_BLOCK_TYPES(HOTSET_TYPE)
#undef HOTSET_TYPE
}

inline void add_formats(Kernels& table) {
    for_formats([&]<class Format>() {
        table.linear[int(Format::kType)] = linear<Format>;
        table.gather[int(Format::kType)] = gather<Format>;
    });
}
