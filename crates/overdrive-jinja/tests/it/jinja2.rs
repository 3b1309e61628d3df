//! Templates against jinja2 in the environment of transformers (`fixtures/gen_jinja.py`).

use overdrive_jinja::Template;
use serde_json::{Map, Value};

fn fixture() -> Value {
    serde_json::from_str(include_str!("../fixtures/jinja.json")).expect("gen_jinja.py makes it")
}

fn render(template: &str, context: &Map<String, Value>) -> overdrive_jinja::Result<String> {
    Template::parse(template)?.render(context)
}

/// Asserts that each template has the text of jinja2, or is refused where there is none.
fn check(fixture: &Value, cases: &[(String, Option<String>)]) {
    let context = fixture["context"].as_object().unwrap();
    let mut wrong = Vec::new();
    for (template, want) in cases {
        let got = render(template, context);
        let has_panicked = matches!(&got, Err(error) if error.to_string().contains("panicked"));
        if got.as_ref().ok() != want.as_ref() || has_panicked {
            wrong.push(format!("{template:?}\n  is   {got:?}\n  not  {want:?}"));
        }
    }
    let first = wrong[..wrong.len().min(20)].join("\n");
    let (wrong, count) = (wrong.len(), cases.len());
    assert_eq!(wrong, 0, "{wrong} of {count} differ:\n{first}");
}

fn strings(values: &Value) -> Vec<&str> {
    let values = values.as_array().unwrap().iter();
    values.map(|value| value.as_str().unwrap()).collect()
}

/// Returns the expected texts of a row of a table, `None` for what must be refused; the inner value is `None` for a
/// case that is left out.
fn expanded(row: &Value) -> Vec<Option<Option<String>>> {
    let mut expected = Vec::new();
    for entry in row.as_array().unwrap() {
        let (count, case) = match entry {
            Value::Number(count) => match count.as_i64().unwrap() {
                refused @ 1.. => (refused, Some(None)),
                left_out => (-left_out, None),
            },
            Value::Array(run) => {
                let text = run[1].as_str().unwrap().to_owned();
                (run[0].as_i64().unwrap(), Some(Some(text)))
            }
            text => (1, Some(Some(text.as_str().unwrap().to_owned()))),
        };
        expected.extend(std::iter::repeat_n(case, usize::try_from(count).unwrap()));
    }
    expected
}

#[test]
fn every_test_filter_method_and_operator_gives_what_jinja2_gives() {
    let fixture = fixture();
    let (mut cases, mut templates) = (Vec::new(), 0);
    for table in fixture["tables"].as_array().unwrap() {
        let set = |name: &str, value: &str| format!("{{% set {name} = {value} %}}");
        let values = strings(&fixture["values"][table["values"].as_str().unwrap()]);
        for (template, row) in table["rows"].as_object().unwrap() {
            let xs = values.iter().map(|x| set("X", x));
            let prefixes: Vec<String> = match template.contains('Y') {
                true => xs
                    .flat_map(|x| values.iter().map(move |y| format!("{x}{}", set("Y", y))))
                    .collect(),
                false => xs.collect(),
            };
            let expected = expanded(row);
            assert_eq!(prefixes.len(), expected.len(), "{template}");
            for (prefix, want) in prefixes.into_iter().zip(expected) {
                if let Some(want) = want {
                    cases.push((format!("{prefix}{template}"), want));
                }
            }
            templates += 1;
        }
    }
    assert_eq!((templates, cases.len()), (390, 24_688));
    check(&fixture, &cases);
}

#[test]
fn statements_whitespace_and_errors_are_those_of_jinja2() {
    let fixture = fixture();
    let cases = fixture["cases"].as_array().unwrap();
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let cases: Vec<_> = cases
        .iter()
        .map(|case| (text(&case[0]).unwrap(), text(&case[1])))
        .collect();
    assert_eq!(cases.len(), 188);
    check(&fixture, &cases);
}

/// Returns a random template: its first letter is the number of its form, whose gaps are filled with the rest.
fn filled(template: &str, forms: &[&str]) -> String {
    let (form, expressions) = template.split_at(1);
    let mut expressions = expressions.split('§');
    let parts = forms[form.parse::<usize>().unwrap()].split('§');
    let filled = parts.map(|part| [part, expressions.next().unwrap_or_default()].concat());
    filled.collect()
}

#[test]
fn templates_composed_at_random_give_what_jinja2_gives() {
    let fixture = fixture();
    let preamble = fixture["preamble"].as_str().unwrap();
    let rendered = fixture["random"].as_object().unwrap().iter();
    let rendered = rendered.map(|(template, want)| (template.as_str(), want.as_str()));
    let (refused, forms) = (strings(&fixture["refused"]), strings(&fixture["forms"]));
    let refused = refused.into_iter().map(|template| (template, None));
    let cases: Vec<_> = rendered
        .chain(refused)
        .map(|(template, want)| {
            let source = format!("{preamble}{}", filled(template, &forms));
            (source, want.map(str::to_owned))
        })
        .collect();
    assert_eq!(cases.len(), 3000);
    check(&fixture, &cases);
}

/// The expected text is that of jinja2 3.1.6.
#[test]
fn line_ends_of_a_template_are_line_feeds_whatever_its_file_has() {
    let source = "{% for m in [1, 2] %}\n<{{ m }}>\n\n{{ 'a\nb' }}{% endfor %}\n\n";
    for source in [
        source.to_owned(),
        source.replace('\n', "\r\n"),
        source.replace('\n', "\r"),
    ] {
        let text = render(&source, &Map::new()).unwrap();
        assert_eq!(text, "<1>\n\na\nb<2>\n\na\nb", "{source:?}");
    }
}

/// The expected texts are those of jinja2 3.1.6.
#[test]
fn undefined_values_are_empty_and_strings_and_mappings_are_sequences() {
    let source = "{{ m.x|length }}{{ m.x|count }}{{ m.x|items|list }}{{ 'abc'|length }}{{ m|items|list }} \
                  {{ 'a' is sequence }} {{ m is sequence }} {{ [] is sequence }} {{ 1 is sequence }} \
                  {{ none is sequence }}";
    let context = [("m".to_owned(), serde_json::json!({"a": 1}))];
    let text = render(source, &context.into_iter().collect());
    assert_eq!(text.unwrap(), "00[]3[('a', 1)] True True True False False");
    assert!(render("{{ 1|length }}", &Map::new()).is_err());
    let tools = "{% if tools is iterable and tools | length > 0 %}tools{% else %}none{% endif %}";
    for (context, want) in [(Map::new(), "none"), (null("tools"), "none")] {
        assert_eq!(render(tools, &context).unwrap(), want);
    }
}

fn null(name: &str) -> Map<String, Value> {
    [(name.to_owned(), Value::Null)].into_iter().collect()
}

/// The expected texts are those of jinja2 3.1.6 with Python 3.11.
#[test]
fn numbers_print_as_in_python() {
    for (number, text) in [
        ("1.0", "1.0"),
        ("0.1", "0.1"),
        ("-2.5", "-2.5"),
        ("1e15", "1000000000000000.0"),
        ("1e16", "1e+16"),
        ("1.5e300", "1.5e+300"),
        ("0.0001", "0.0001"),
        ("0.00001", "1e-05"),
        ("-1.25e-7", "-1.25e-07"),
        ("1e308 * 10", "inf"),
        ("(1e308 * 10) | tojson", "Infinity"),
        ("(1e308 * 10 - 1e308 * 10) | tojson", "NaN"),
    ] {
        let printed = render(&format!("{{{{ {number} }}}}"), &Map::new());
        assert_eq!(printed.unwrap(), text, "{number}");
    }
}

/// The expected texts are those of jinja2 3.1.6 with Python 3.11.
#[test]
fn methods_of_strings_are_those_of_python() {
    for (source, want) in [
        ("s.removeprefix('<t>')", "x</t>"),
        ("s.removesuffix('</t>')", "<t>x"),
        ("s.removeprefix('x')", "<t>x</t>"),
        ("'a.b.c'.rsplit('.', 1)", "['a.b', 'c']"),
        ("' a  b c '.rsplit(none, 1)", "[' a  b', 'c']"),
        ("' a  b '.rsplit()", "['a', 'b']"),
        ("'a.b.c'.rsplit('.')", "['a', 'b', 'c']"),
        ("'a b c'.rsplit(maxsplit=1)", "['a b', 'c']"),
        ("' a b  '.rsplit(none, 0)", "[' a b']"),
        ("''.rsplit()", "[]"),
        ("''.rsplit('.')", "['']"),
        ("'a=b=c'.partition('=')", "('a', '=', 'b=c')"),
        ("'abc'.partition('=')", "('abc', '', '')"),
        ("'a=b=c'.rpartition('=')", "('a=b', '=', 'c')"),
        ("'abc'.rpartition('=')", "('', '', 'abc')"),
        ("'7'.zfill(3)", "007"),
        ("'-7'.zfill(4)", "-007"),
        ("'1234'.zfill(3)", "1234"),
        ("'é'.zfill(2)", "0é"),
        ("' x '.strip()", "x"),
        ("'<!<!-- a -->-- b -->c<d>e' | striptags", "ce"),
        ("'a<!-->b<!--->c<!-- d' | striptags", "abc<!-- d"),
        ("'&lt;a&#62; &amp;nbsp; & b' | striptags", "<a> &nbsp; & b"),
    ] {
        let source = format!("{{% set s = '<t>x</t>' %}}{{{{ {source} }}}}");
        assert_eq!(render(&source, &Map::new()).unwrap(), want, "{source}");
    }
    for source in [
        "''.partition('')",
        "'a'.rsplit('')",
        "'a'.rsplit(1)",
        "'a'.none()",
    ] {
        let source = format!("{{{{ {source} }}}}");
        assert!(render(&source, &Map::new()).is_err(), "{source}");
    }
}

#[test]
fn only_tags_named_generation_mark_text() {
    let marked = |source: &str| {
        let template = Template::parse(source).unwrap();
        let text = template.render_marked(&Map::new(), ('[', ']')).unwrap();
        (template.has_generation(), text)
    };
    let source = "a{%- if '%' %} b{%- generation -%} c {%- endgeneration %}{% endif %}{% set generation = 1 %}{{ generation }}";
    assert_eq!(marked(source), (true, "a b[c]1".to_owned()));
    let captured = "{% set x %}{% generation %}a{% endgeneration %}{% endset %}b{{ x }}";
    assert_eq!(marked(captured), (true, "b[a]".to_owned()));
    let quoted =
        "{{ '{% generation %}' }}{# {% generation %} #}{% raw %}{% generation %}{% endraw %}";
    assert_eq!(
        marked(quoted),
        (false, "{% generation %}{% generation %}".to_owned())
    );
}

#[test]
fn a_tag_whose_opening_and_closing_share_a_character_is_a_syntax_error() {
    for source in ["{%}", "a{%}b{% generation", "{%}{% x %}"] {
        let error = Template::parse(source).unwrap_err();
        assert!(
            error.to_string().starts_with("line 1: syntax error"),
            "{error}"
        );
    }
}

/// Found by changing sources at random; the expected texts are those of jinja2 3.1.6.
#[test]
fn rare_sources_give_what_jinja2_gives() {
    for (source, want) in [
        ("a{#", Some("a")),
        ("a{# ", None),
        ("a{% raw %}", Some("a")),
        ("a{% raw %} ", None),
        ("{{ [3][] }}|{{ {(): 1}[] }}", Some("|1")),
        ("{{ [3, 1]|sort(reverse=1) }}", Some("[3, 1]")),
        ("{{ [3, 1]|sort(reverse=none) }}", None),
        ("{{ {'a': 1}|dictsort(reverse='x') }}", None),
        ("{{ 'a'.splitlines(none) }}", None),
    ] {
        let text = render(source, &Map::new());
        assert_eq!(text.ok().as_deref(), want, "{source}");
    }
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    for (template, part) in [
        ("{{ [1] | random }}", "No filter named 'random'"),
        ("{{ 'a' | urlize }}", "No filter named 'urlize'"),
        (
            "{% autoescape true %}{% endautoescape %}",
            "'autoescape' is not supported",
        ),
        ("{% include 'a' %}", "there are no other templates"),
        ("{{ 'a'.encode() }}", "`encode` are not supported"),
        ("{{ '\\N{DASH}' }}", "escapes by name (\\N)"),
        ("{{ 2 ** 200 }}", "more than 128 bits"),
        (
            "{{ ['x' * 99] | pprint }}",
            "pprint of a value that does not fit",
        ),
    ] {
        let error = render(template, &Map::new()).unwrap_err().to_string();
        assert!(error.contains(part), "{template}: {error}");
    }
}

#[test]
fn times_are_written_as_by_python() {
    let written = |format: &str| {
        let template = format!("{{{{ strftime_now('{format}') }}}}");
        render(&template, &Map::new()).unwrap()
    };
    for [shorthand, whole] in [
        ["%c", "%a %b %e %H:%M:%S %Y"],
        ["%x", "%m/%d/%y"],
        ["%X", "%H:%M:%S"],
    ] {
        // One moment for both.
        let text = written(&format!("{shorthand}={whole}"));
        let (shorthand, whole) = text.split_once('=').unwrap();
        assert_eq!(shorthand, whole);
    }
    for _ in 0..20 {
        let digits = written("%f");
        let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
        assert!(digits.len() == 6 && is_number, "{digits}");
    }
    assert_eq!(written("%%f %J é %"), "%f %J é %");
    assert_eq!(written("<%z|%:z|%Z|%%z>"), "<|||%z>");
}

#[test]
fn an_error_of_the_arguments_names_the_filter_or_the_test() {
    for (template, name) in [
        ("{{ 'a'|upper(1) }}", "upper"),
        ("{{ 1 is odd(2) }}", "odd"),
        ("{{ 1 is none(2) }}", "none"),
        ("{{ 1 is sameas(1, 2) }}", "sameas"),
        ("{{ [1]|max(1, 2, 3) }}", "max"),
    ] {
        let text = render(template, &Map::new()).unwrap_err().to_string();
        assert!(
            text.contains(&format!("{name} takes at most")),
            "{template}: {text}"
        );
    }
}
