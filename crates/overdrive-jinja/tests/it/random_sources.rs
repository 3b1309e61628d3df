//! Sources made of random tokens are rendered or refused: they never panic, hang or overflow the stack.

use overdrive_jinja::Template;
use proptest::prelude::*;
use serde_json::json;

/// The parts of sources, which include each tag, operator and bracket.
const TOKENS: &[&str] = &[
    "{{",
    "}}",
    "{%",
    "%}",
    "{#",
    "#}",
    "{%-",
    "-%}",
    "{{-",
    "-}}",
    "{%+",
    "\n",
    " ",
    "é",
    "🦀",
    "for",
    "in",
    "endfor",
    "if",
    "elif",
    "else",
    "endif",
    "set",
    "endset",
    "macro",
    "endmacro",
    "call",
    "endcall",
    "filter",
    "endfilter",
    "with",
    "endwith",
    "block",
    "endblock",
    "generation",
    "endgeneration",
    "raw",
    "endraw",
    "break",
    "continue",
    "recursive",
    "include",
    "and",
    "or",
    "not",
    "is",
    "none",
    "true",
    "loop",
    "loop.",
    "x",
    "y",
    "caller()",
    "varargs",
    "kwargs",
    "m",
    "m(",
    "messages",
    "namespace(",
    "range(",
    "dict(",
    "cycler(",
    "joiner(",
    "upper",
    "sort",
    "map(",
    "join",
    "list",
    "tojson",
    "indent",
    "truncate(",
    "format(",
    "batch(",
    "slice(",
    "round",
    "defined",
    "string",
    "iterable",
    ".content",
    ".items()",
    ".split(",
    ".format(",
    ".center(",
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    ",",
    ":",
    "::",
    ".",
    "|",
    "=",
    "==",
    "<",
    "~",
    "+",
    "-",
    "*",
    "**",
    "/",
    "//",
    "%",
    "'",
    "\"",
    "'a'",
    "'%s'",
    "'{}'",
    "0",
    "1",
    "-1",
    "2.5",
    "1e400",
    "99999",
    "170141183460469231731687303715884105727",
    "\\",
    "$",
];

fn run(source: &str) {
    let variables = json!({
        "messages": [{"role": "user", "content": "é\n🦀"}, {"role": "assistant", "content": null}],
        "x": [3, 1.5, "a", null, true, {"k": []}],
        "y": "a b",
    });
    let variables = variables.as_object().unwrap();
    let result = Template::parse(source).and_then(|template| template.render(variables));
    if let Err(error) = result {
        assert!(
            !error.to_string().contains("panicked"),
            "{source:?}: {error}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn random_tokens_never_panic(tokens in prop::collection::vec(prop::sample::select(TOKENS), 0..40)) {
        run(&tokens.concat());
        run(&tokens.join(" "));
        // Within a tag, so that more of them are expressions.
        run(&format!("{{{{ {} }}}}", tokens.join(" ")));
    }

    #[test]
    fn random_suffixes_of_a_value_never_panic(
        value in prop::sample::select(&["x", "y", "messages", "'%5d|{:>3}'", "3", "none", "{'a': [1]}", "missing"][..]),
        suffixes in prop::collection::vec(prop::sample::select(&[
            "[0]", "[-1]", "[::-1]", "[1:99:2]", "[:-2]", ".a", "|list", "|join('-')", "|string", "|upper", "|sort",
            "|reverse", "|first", "|last", "|length", "|tojson(indent=1)", "|map('upper')", "|select", "|indent(2)",
            "|batch(2)", "|slice(3)", "|groupby(0)", "|dictsort", "|unique", "|wordwrap(3)", "|truncate(4)", "|pprint",
            "|int", "|float", "|round(1)", "|abs", "|default(1)", "|format(1)", "|replace('a', 'é')", "|center(9)",
            "|urlencode", "|xmlattr", "|striptags", "|filesizeformat", ".items()", ".get('a')", ".split()",
            ".format(1, a=2)", ".title()", ".swapcase()", ".casefold()", ".zfill(9)", ".expandtabs()", ".splitlines()",
            "+ 1", "* 2", "~ 'é'", "% 2", "** 2", "// 0.5", "< 2", "in 'a'", "is odd", "is sequence", "is mapping",
        ][..]), 0..6),
    ) {
        run(&format!("{{{{ {value} {} }}}}", suffixes.join(" ")));
        run(&format!("{{% for a in {value} {} %}}{{{{ loop.length }}}}{{{{ a }}}}{{{{ loop.last }}}}{{% endfor %}}", suffixes.join(" ")));
    }

    #[test]
    fn random_bytes_never_panic(source in "\\PC{0,80}") {
        run(&source);
    }
}
