"""How byte-level BPE files split text into words before merging: one row per name of `tokenizer.ggml.pre`.

A row is a list of regular expressions, applied one after the other. Each splits the pieces that the previous
one left: each match, and each gap between matches, becomes a piece. Expressions come from the models'
own tokenizer.json files if they are known (Oniguruma syntax, which `tokenizers` runs). The names are the ones
that llama.cpp's converter writes. llama.cpp has no Unicode regex engine and approximates `(?i:...)` and the
cased letter classes; here they are exact.
"""

from dataclasses import dataclass, replace

from hotset.errors import TokenizerError


@dataclass(frozen=True)
class PreTokenizer:
    """One way of splitting text into words.

    patterns: regular expressions, applied in order.
    ignore_merges: a word that is a token becomes that token, whatever the merges say.
    add_bos: whether BOS begins a text if the file has no `tokenizer.ggml.add_bos_token`.
    normalises: whether text is normalised to NFC first, as by the normaliser of the published tokenizer
        (tokenizer.json, or the code of its class). No key of GGUF states it.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    normalises: bool = False


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"

_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"


def _cl100k(
    digits: str,
    *,
    contraction: str = _CONTRACTION + "|",
    word: str = r"[^\r\n\p{L}\p{N}]?\p{L}+",
    symbols: str = r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    newlines: str = r"\s*[\r\n]+",
    spaces: str = _SPACES,
) -> str:
    """Return an expression of the cl100k_base family (OpenAI); its members differ in these arguments."""
    return f"{contraction}{word}|{digits}|{symbols}|{newlines}|{spaces}"


def _o200k(
    digits: str, *, suffix: str = _CONTRACTION + "?", letters: str = "", symbols: str = r"[\r\n/]*"
) -> str:
    """Return an expression of the o200k_base family, whose words are upper case, then lower case letters.

    Either kind may be missing. letters: a set intersected with the letters of a word (Kimi excludes Han).
    """
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{letters}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{letters}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = f"{lead}{upper}*{lower}+{suffix}|{lead}{upper}+{lower}*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{symbols}|\s*[\r\n]+|{_SPACES}"


_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_HAN_KANA = "[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK3_WORDS = rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_DEEPSEEK3 = rf"{_DEEPSEEK3_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"

# Cased letters as DeepSeek's first tokenizer lists them: an old and incomplete table (no Armenian lower
# case), so \p{Lu} and similar classes would be wrong.
_DEEPSEEK_CASED = (
    r"A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅ"
    r"ὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-"
    r"ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_CJK = "[一-龥ࠀ-一가-퟿]+"

_AFMOE_ASIAN = "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
# Runs of digits in groups of three, counted from the right (1234567 is 1 234 567).
_DIGITS_FROM_RIGHT = r"\d{1,3}(?=(?:\d{3})*\b)"

_gpt2 = PreTokenizer((_GPT2,))
_starcoder = PreTokenizer((r"\p{N}", _GPT2))
_llama3 = PreTokenizer((_cl100k(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_cl100k_plain = PreTokenizer((_cl100k(r"\p{N}{1,3}"),))
_digit = PreTokenizer((_cl100k(r"\p{N}"),))
_gpt4o = PreTokenizer((_o200k(r"\p{N}{1,3}"),))
_deepseek3 = PreTokenizer((r"\p{N}{1,3}", _HAN_KANA, _DEEPSEEK3))
_bloom = PreTokenizer((_BLOOM,))
_glm4 = PreTokenizer((_cl100k(r"\p{N}{1,3}"),), ignore_merges=True)
_bailing = PreTokenizer((_cl100k(r"\p{N}", contraction=r"'(?i:[sdmt]|ll|ve|re)|", newlines=r"\s*[\r\n]"),))
_tiny_aya = PreTokenizer((_DIGITS_FROM_RIGHT, _o200k(r"\p{N}{1,3}")))
_default = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

_TABLE: dict[tuple[str, ...], PreTokenizer] = {
    ("", "default"): _default,
    (
        "llama3",
        "llama-v3",
        "llama-bpe",
        "falcon3",
        "falcon-h1",
        "pixtral",
        "midm-2.0",
        "lfm2",
        "jina-v5-nano",
    ): _llama3,
    ("dbrx", "smaug-bpe", "chatglm-bpe"): _cl100k_plain,
    ("glm4", "glm5"): _glm4,
    ("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan"): replace(_digit, normalises=True),
    ("kormo", "f2llmv2", "megrez", "solar-open", "grok-2"): _digit,
    ("qwen35",): PreTokenizer(
        (
            _cl100k(
                r"\p{N}", word=r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", symbols=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
            ),
        ),
        normalises=True,
    ),
    ("ufakzeka",): PreTokenizer((_cl100k(r"\p{N}", contraction=""),)),
    (
        "gpt-2",
        "phi-2",
        "jina-es",
        "jina-de",
        "gigachat",
        "jina-v2-es",
        "jina-v2-de",
        "jina-v1-en",
        "jina-v2-code",
        "roberta-bpe",
        "a.x-4.0",
        "mellum",
        "jais",
        "trillion",
        "granite-docling",
        "exaone4",
    ): _gpt2,
    ("mpt", "olmo", "modern-bert"): replace(_gpt2, normalises=True),
    ("command-r",): replace(_starcoder, normalises=True),
    (
        "starcoder",
        "refact",
        "smollm",
        "codeshell",
        "exaone",
        "minerva-7b",
        "mellum2",
    ): _starcoder,
    ("falcon",): PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    ("deepseek-llm",): PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_CASED}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            _DEEPSEEK_CJK,
            r"\p{N}",
        )
    ),
    ("deepseek-coder",): PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"): _deepseek3,
    ("spark2_5",): PreTokenizer(
        (
            r"\p{N}{1,3}",
            _HAN_KANA,
            rf"{_DEEPSEEK3_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|{_SPACES}",
            r"\p{N}",
        )
    ),
    ("youtu",): PreTokenizer(
        (
            "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + _HAN_KANA,
            _o200k(r"\p{N}"),
        ),
        ignore_merges=True,
    ),
    ("jais-2",): PreTokenizer(
        (
            _cl100k(
                r"\p{N}{1,3}",
                spaces=r"|".join(
                    rf"\s{{{n}}}(?!\S)" for n in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")
                )
                + r"|\s{1}",
            ),
        )
    ),
    ("poro-chat", "bloom", "gpt3-finnish"): _bloom,
    ("viking",): PreTokenizer((_BLOOM, r"\p{N}")),
    ("tekken",): PreTokenizer((_o200k(r"\p{N}", suffix=""),), ignore_merges=True, add_bos=True),
    ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"): _gpt4o,
    ("granite-embed-multi-97m",): PreTokenizer((_o200k(r"\p{N}{1,3}"),), ignore_merges=True),
    ("tiny_aya", "cohere2moe"): _tiny_aya,
    ("chameleon",): PreTokenizer(
        (
            r"<sentinel:[0-9]+>",
            r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        add_bos=True,
    ),
    ("kimi-k2",): PreTokenizer(
        (r"\p{Han}+|" + _o200k(r"\p{N}{1,3}", letters=r"&&[^\p{Han}]", symbols=r"[\r\n]*"),)
    ),
    ("superbpe",): PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    ("bailingmoe", "bailingmoe2", "llada-moe"): _bailing,
    ("seed-coder",): PreTokenizer((_cl100k(r"\p{N}", symbols=r" ?[^\s\p{L}\p{N}\r\n]+"),)),
    ("afmoe",): PreTokenizer((_DIGITS_FROM_RIGHT, _AFMOE_ASIAN, _DEEPSEEK3)),
    ("laguna",): PreTokenizer((r"[^\n]+|[\n]+", _cl100k(r"\p{N}"))),
    ("exaone-moe",): PreTokenizer(
        (
            _cl100k(
                r"\p{N}",
                word=r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
                symbols=r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
                newlines=r"\s*[\r\n]",
            ),
        )
    ),
    ("minicpm5",): PreTokenizer((r"\p{N}{1,3}", _cl100k(r"\p{N}+")), ignore_merges=True),
}

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: row for names, row in _TABLE.items() for name in names}
"""Every known value of `tokenizer.ggml.pre` ("" if the key is absent) → its row."""

UNNAMED = {"opt": "gpt-2", "falcon": "falcon"}
"""Architecture → the name that its files imply without the key, which PowerInfer's converter never writes."""


def pre_tokenizer(name: object) -> PreTokenizer:
    """Return the row of `name`. Raises TokenizerError for an unknown one: a guess would change the tokens."""
    row = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if row is None:
        shown = repr(name[:60]) if isinstance(name, str) else f"a {type(name).__name__} and no name"
        raise TokenizerError(
            f"The file's pre-tokenizer (tokenizer.ggml.pre) is {shown}, which this version does not know: "
            "update hotset, or reconvert the model."
        )
    return row
