//! The rules by which byte-level BPE cuts a text into words, by the names of `tokenizer.ggml.pre`.
//!
//! Each rule is a list of regular expressions: the matches of the first one are words, and so is the text between
//! them, and each word is cut again by the next one. The expressions are those of the models' `tokenizer.json` files,
//! where llama.cpp has rewritten one for its own engine.

/// A rule that splits text into words, and the settings that depend on it.
#[derive(Debug, Clone, Copy)]
pub(super) struct WordRule {
    pub(super) patterns: &'static [&'static str],
    /// If `true`, a word that is a token is not merged from its bytes.
    pub(super) ignore_merges: bool,
    /// If `true`, the beginning-of-text token is added, unless the file says otherwise.
    pub(super) add_bos: bool,
}

/// The names for messages.
pub(super) const KNOWN: &str = "those of llama.cpp: llama-bpe, qwen2, qwen35, gpt-2, smollm, starcoder, command-r, \
    deepseek-llm, deepseek-coder, deepseek-v3, tekken, gpt-4o, chatglm-bpe, glm4, stablelm2, olmo, mpt, falcon and \
    others";

/// The contractions of English, in either case.
macro_rules! contractions {
    () => {
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    };
}

/// A pattern for words, for numbers of some digits, for other signs, and for white space.
macro_rules! words {
    ($words:expr, $digits:expr) => {
        concat!(
            $words,
            r"|",
            $digits,
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
    };
}

/// Words whose capital letters begin them.
macro_rules! cased {
    ($end:expr, $digits:expr) => {
        concat!(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
            $end,
            r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
            $end,
            r"|",
            $digits,
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
    };
}

/// Words after punctuation, words with marks, and other signs.
macro_rules! punctuated {
    ($end:expr) => {
        concat!(
            r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"##,
            r"| ?[\p{P}\p{S}]+", $end, r"|\s+(?!\S)|\s+"
        )
    };
}

macro_rules! letters {
    () => {
        concat!(contractions!(), r"|[^\r\n\p{L}\p{N}]?\p{L}+")
    };
}

pub(super) const GPT2: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = words!(letters!(), r"\p{N}{1,3}");
const QWEN2: &str = words!(letters!(), r"\p{N}");
pub(super) const DIGIT: &str = r"\p{N}";
const DIGITS_3: &str = r"\p{N}{1,3}";
/// Chinese characters, hiragana and katakana.
const CJK: &str = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+";
/// The ranges of Chinese and Korean characters, and of those between them, that the first DeepSeek models use.
const ASIAN: &str = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+";
const CASED_3: &str = cased!(concat!(contractions!(), "?"), r"\p{N}{1,3}");
const BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";
/// The letters with two cases, as DeepSeek lists them.
const CASED_LETTERS: &str = concat!(
    r"\s?[A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}",
    r"\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}",
    r"\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}",
    r"\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}",
    r"\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}",
    r"\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}",
    r"\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}",
    r"\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}",
    r"\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}",
    r"\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}",
    r"\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}",
    r"\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}",
    r"\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}]+"
);
const PUNCTUATION: &str =
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+";
const KIMI: &str = concat!(
    r"[\p{Han}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+",
    contractions!(),
    r"?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*",
    contractions!(),
    r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// llama.cpp's rule for files without the name of a rule: they were made before rules had names.
pub(super) const DEFAULT: WordRule =
    plain(&[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"]);

const fn plain(patterns: &'static [&'static str]) -> WordRule {
    WordRule {
        patterns,
        ignore_merges: false,
        add_bos: false,
    }
}

const fn without_merges(patterns: &'static [&'static str]) -> WordRule {
    WordRule {
        ignore_merges: true,
        ..plain(patterns)
    }
}

const fn with_bos(rule: WordRule) -> WordRule {
    WordRule {
        add_bos: true,
        ..rule
    }
}

/// One name for each rule that can be written.
const WRITTEN: [&str; 17] = [
    "gpt-2",
    "llama-bpe",
    "qwen2",
    "qwen35",
    "smollm",
    "glm4",
    "gpt-4o",
    "tekken",
    "deepseek-v3",
    "deepseek-llm",
    "deepseek-coder",
    "falcon",
    "bloom",
    "superbpe",
    "seed-coder",
    "exaone-moe",
    "default",
];

/// Returns the name of the rule with these patterns.
pub(super) fn name_of(patterns: &[String], ignore_merges: bool) -> Option<&'static str> {
    let mut names = WRITTEN.into_iter();
    names.find(|name| {
        rule(name)
            .is_some_and(|rule| rule.patterns == patterns && rule.ignore_merges == ignore_merges)
    })
}

/// Returns the rule of a name.
pub(super) fn rule(name: &str) -> Option<WordRule> {
    Some(match name {
        "default" => DEFAULT,
        "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0"
        | "lfm2" | "jina-v5-nano" => with_bos(without_merges(&[LLAMA3])),
        "dbrx" | "smaug-bpe" | "glm4" | "chatglm-bpe" => plain(&[LLAMA3]),
        "qwen2" | "deepseek-r1-qwen" | "kormo" | "f2llmv2" | "megrez" | "stablelm2" | "hunyuan"
        | "solar-open" | "grok-2" => plain(&[QWEN2]),
        "qwen35" => plain(&[concat!(
            contractions!(),
            r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )]),
        "ufakzeka" => plain(&[words!(r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}")]),
        "laguna" => plain(&[r"[^\n]+|[\n]+", QWEN2]),
        "minicpm5" => without_merges(&[DIGITS_3, words!(letters!(), r"\p{N}+")]),
        "gpt-2" | "phi-2" | "jina-es" | "jina-de" | "jina-v1-en" | "jina-v2-es" | "jina-v2-de"
        | "jina-v2-code" | "roberta-bpe" | "gigachat" | "a.x-4.0" | "mellum" | "modern-bert"
        | "exaone4" | "mpt" | "olmo" | "jais" | "trillion" | "granite-docling" => plain(&[GPT2]),
        "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" | "minerva-7b"
        | "mellum2" => plain(&[DIGIT, GPT2]),
        "falcon" => plain(&[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"]),
        "deepseek-llm" => plain(&[
            r"[\r\n]",
            CASED_LETTERS,
            PUNCTUATION,
            r"\s+$",
            ASIAN,
            r"\p{N}+",
        ]),
        "deepseek-coder" => plain(&[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", ASIAN, DIGIT]),
        "deepseek-v3" | "hunyuan-dense" | "joyai-llm" | "hy_v4" => {
            plain(&[DIGITS_3, CJK, punctuated!(r"[\r\n]*|\s*[\r\n]+")])
        }
        "spark2_5" => plain(&[DIGITS_3, CJK, punctuated!(r"|[\r\n]"), DIGIT]),
        "tekken" => with_bos(without_merges(&[cased!("", r"\p{N}")])),
        "gpt-4o" | "llama4" | "kanana2" | "talkie" | "minimax-m2" => plain(&[CASED_3]),
        "granite-embed-multi-97m" => without_merges(&[CASED_3]),
        "tiny_aya" | "cohere2moe" => plain(&[r"\d{1,3}(?=(?:\d{3})*\b)", CASED_3]),
        "kimi-k2" => plain(&[KIMI]),
        "youtu" => without_merges(&[
            concat!(
                r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+|[！…“”‘’—：；，、\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+",
                r"|[\x{3105}-\x{312F}]+|[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
            ),
            cased!(concat!(contractions!(), "?"), r"\p{N}"),
        ]),
        "bloom" | "poro-chat" | "gpt3-finnish" => plain(&[BLOOM]),
        "viking" => plain(&[BLOOM, DIGIT]),
        "superbpe" => plain(&[r"\p{N}+", r"(?=(\d{3})+(?!\d))"]),
        "bailingmoe" | "bailingmoe2" | "llada-moe" => plain(&[
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        ]),
        "seed-coder" => plain(&[concat!(
            letters!(),
            r"|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
        )]),
        "jais-2" => plain(&[concat!(
            letters!(),
            r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)",
            r"|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
        )]),
        "exaone-moe" => plain(&[concat!(
            contractions!(),
            r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
            r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
        )]),
        "chameleon" => with_bos(plain(&[
            r"<sentinel:[0-9]+>",
            r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            DIGIT,
            r"[\p{P}!-/:-@\[-`{-~]",
            GPT2,
        ])),
        _ => return None,
    })
}
