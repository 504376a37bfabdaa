// Enters the matrix products of every quantised format into a table of kernels.
// Included inside the namespace of an instruction set, after its formats, `linear` and sparse_kernels.h.

inline void add_formats(Kernels& table) {
    auto add = [&]<class Format>() {
        table.linear[int(Format::kType)] = linear<Format>;
        table.gather[int(Format::kType)] = gather<Format>;
    };
    add.operator()<FormatQ4_0>();
    add.operator()<FormatQ4_1>();
    add.operator()<FormatQ5_0>();
    add.operator()<FormatQ5_1>();
    add.operator()<FormatQ8_0>();
    add.operator()<FormatQ2_K>();
    add.operator()<FormatQ3_K>();
    add.operator()<FormatQ4_K>();
    add.operator()<FormatQ5_K>();
    add.operator()<FormatQ6_K>();
    add.operator()<FormatIQ4_NL>();
    add.operator()<FormatIQ4_XS>();
    add.operator()<FormatMXFP4>();
    add.operator()<FormatTQ1_0>();
    add.operator()<FormatTQ2_0>();
    add.operator()<FormatIQ1_S>();
    add.operator()<FormatIQ1_M>();
    add.operator()<FormatIQ2_XXS>();
    add.operator()<FormatIQ2_XS>();
    add.operator()<FormatIQ2_S>();
    add.operator()<FormatIQ3_XXS>();
    add.operator()<FormatIQ3_S>();
}
