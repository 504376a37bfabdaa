// Adds the matrix products of every quantised format to a table of kernels. Included inside the namespace of
// an instruction set, after its formats, `linear` and sparse_kernels.h.

template <class Add>
inline void for_formats(Add add) {
    add.template operator()<FormatQ4_0>();
    add.template operator()<FormatQ4_1>();
    add.template operator()<FormatQ5_0>();
    add.template operator()<FormatQ5_1>();
    add.template operator()<FormatQ8_0>();
    add.template operator()<FormatQ2_K>();
    add.template operator()<FormatQ3_K>();
    add.template operator()<FormatQ4_K>();
    add.template operator()<FormatQ5_K>();
    add.template operator()<FormatQ6_K>();
    add.template operator()<FormatIQ4_NL>();
    add.template operator()<FormatIQ4_XS>();
    add.template operator()<FormatMXFP4>();
    add.template operator()<FormatTQ1_0>();
    add.template operator()<FormatTQ2_0>();
    add.template operator()<FormatIQ1_S>();
    add.template operator()<FormatIQ1_M>();
    add.template operator()<FormatIQ2_XXS>();
    add.template operator()<FormatIQ2_XS>();
    add.template operator()<FormatIQ2_S>();
    add.template operator()<FormatIQ3_XXS>();
    add.template operator()<FormatIQ3_S>();
}

inline void add_formats(Kernels& table) {
    for_formats([&]<class Format>() {
        table.linear[int(Format::kType)] = linear<Format>;
        table.gather[int(Format::kType)] = gather<Format>;
    });
}
