//! The limits of templates: what is beyond them is refused, in a bounded time, and never overflows the stack.

use std::time::{Duration, Instant};

use overdrive_jinja::Template;
use serde_json::{Map, Value, json};

fn render(source: &str) -> overdrive_jinja::Result<String> {
    Template::parse(source)?.render(&Map::new())
}

fn refusal(source: &str) -> String {
    render(source).unwrap_err().to_string()
}

#[test]
fn an_endless_loop_ends_with_an_error_that_names_its_line() {
    let error = refusal(
        "a\n{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    );
    let expected = "line 2: it exceeds the step limit of one rendering";
    assert!(error.starts_with(expected), "{error}");
    // Through macros, which call one another.
    let error = refusal("{% macro m(x) %}{{ m(x) }}{{ m(x) }}{% endmacro %}{{ m(1) }}");
    assert!(error.contains("recursion"), "{error}");
    let error = refusal("{% for x in [1] recursive %}{{ loop([x]) }}{% endfor %}");
    assert!(error.contains("recursion"), "{error}");
}

#[test]
fn operations_on_long_texts_count_as_many_steps() {
    let start = Instant::now();
    for operation in ["x | wordcount", "'b' in x", "x == y"] {
        let source = format!(
            "{{% set x = 'a' * 20000000 %}}{{% set y = x | string ~ 'b' %}}{{% for i in range(99999) %}}{{% for j in range(99999) %}}\
             {{% if {operation} %}}{{% endif %}}{{% endfor %}}{{% endfor %}}"
        );
        let error = refusal(&source);
        assert!(error.contains("step limit"), "{operation}: {error}");
    }
    assert!(
        start.elapsed() < Duration::from_secs(120),
        "{:?}",
        start.elapsed()
    );
}

#[test]
fn tags_and_comments_are_stripped_and_keys_sorted_in_a_time_that_is_not_quadratic() {
    let start = Instant::now();
    let text = render("{{ (('<!-- a --><b>x</b>' * 100000) | striptags | length) }}").unwrap();
    assert_eq!(text, "100000");
    let text = render(
        "{% set ns = namespace(p=[]) %}{{ (dict(range(90000) | map('string') | batch(2) | list | reverse)\
         | tojson(sort_keys=true))[:20] }}",
    );
    assert_eq!(text.unwrap(), "{\"0\": \"1\", \"10\": \"11");
    assert!(
        start.elapsed() < Duration::from_secs(60),
        "{:?}",
        start.elapsed()
    );
}

#[test]
fn values_that_a_loop_nests_or_doubles_are_refused() {
    let nested = "nested more than 100 levels deep";
    let elements = "more than 16777216 elements together";
    let bytes = "more than 67108864 bytes";
    for (assigned, reason) in [
        ("[ns.x]", nested),
        ("{'a': ns.x}", nested),
        ("[ns.x, 1][:1]", nested),
        ("[[ns.x] | reverse]", nested),
        ("namespace(x=ns.x)", "a namespace is assigned"),
        ("[ns]", "a namespace is assigned"),
        ("ns", "a namespace is assigned"),
        ("loop", "a loop is assigned"),
        ("[ns.x, ns.x]", elements),
        ("ns.x + ns.x", elements),
        ("[1] * 9999999999", elements),
        ("ns.x ~ ns.x", bytes),
        ("ns.s * 9999999999", bytes),
        ("ns.s.center(9999999999)", bytes),
        ("'%99999d' % 1", "larger than 65536"),
        ("'{:99999}'.format(1)", "larger than 65536"),
    ] {
        let source = format!(
            "{{% set ns = namespace(x=[1], s='ab') %}}{{% for i in range(99999) %}}{{% set ns.x = {assigned} %}}{{% endfor %}}"
        );
        let error = refusal(&source);
        assert!(error.contains(reason), "{assigned}: {error}");
    }
    let doubled = "{% set x = [x, x] %}".repeat(40);
    let error = refusal(&format!("{{% set x = [1] %}}{doubled}"));
    assert!(error.contains(elements), "{error}");
}

#[test]
fn a_long_text_is_refused_and_a_short_one_beside_it_is_not() {
    let text = "x".repeat(1 << 10);
    let times = |loops: usize| {
        format!(
            "{{% for i in range({loops}) %}}{{% for j in range(1024) %}}{text}{{% endfor %}}{{% endfor %}}"
        )
    };
    let error = refusal(&times(65));
    assert!(error.contains("more than 67108864 bytes"), "{error}");
    assert_eq!(render(&times(2)).unwrap().len(), 2 << 20);
}

#[test]
fn a_source_that_nests_without_end_is_refused_or_rendered_but_never_overflows_the_stack() {
    let deep = 60_000;
    for source in [
        format!("{{{{ {}1{} }}}}", "[".repeat(deep), "]".repeat(deep)),
        format!("{{% set {}x{} = 1 %}}", "(".repeat(deep), ")".repeat(deep)),
        format!("{{{{ {}1 }}}}", "not ".repeat(deep)),
        format!("{{{{ {}1 }}}}", "-".repeat(deep)),
        format!("{{{{ 1{} }}}}", " if 1 else 2".repeat(deep / 4)),
        "{% if 1 %}".repeat(deep / 5),
        format!(
            "{{{{ '{}{}'.format(1) }}}}",
            "{:".repeat(deep),
            "}".repeat(deep)
        ),
    ] {
        render(&source).unwrap_err();
    }
    for source in [
        format!("{{{{ 1{} }}}}", "+1".repeat(deep)),
        format!("{{{{ 2{} }}}}", "**1".repeat(deep)),
        format!("{{{{ [1]{} }}}}", "|list".repeat(deep / 2)),
    ] {
        render(&source).unwrap();
    }
    let batches = "|batch(1)|list".repeat(deep / 5);
    let error = refusal(&format!("{{{{ ([1]{batches})|string|length }}}}"));
    assert!(error.contains("100 levels deep"), "{error}");
    let error = refusal(&"x".repeat((256 << 10) + 1));
    assert!(error.contains("it has 262145 bytes"), "{error}");
}

#[test]
fn a_variable_that_is_nested_too_deep_is_refused() {
    let nested = |levels: usize| (0..levels).fold(json!(1), |inner, _| Value::Array(vec![inner]));
    let template = Template::parse("{{ x | string | length }}").unwrap();
    let variables = |x: Value| [("x".to_owned(), x)].into_iter().collect::<Map<_, _>>();
    assert_eq!(template.render(&variables(nested(100))).unwrap(), "201");
    let error = template.render(&variables(nested(2000))).unwrap_err();
    assert!(error.to_string().contains("100 levels deep"), "{error}");
}

#[test]
fn templates_are_rendered_by_several_threads_at_once() {
    let template = Template::parse("{% for i in range(3) %}{{ i * x }},{% endfor %}").unwrap();
    std::thread::scope(|scope| {
        for x in 0..8 {
            let template = &template;
            scope.spawn(move || {
                let variables = [("x".to_owned(), json!(x))].into_iter().collect();
                let want = format!("0,{x},{},", 2 * x);
                assert_eq!(template.render(&variables).unwrap(), want);
            });
        }
    });
}

#[test]
fn the_text_of_a_large_value_is_refused_before_it_is_made() {
    // Its text would have a gigabyte.
    let value = "{% set x = 'a' * 60000000 %}{% set y = [x] * 17 %}";
    for use_ in [
        "{{ y | string | length }}",
        "{{ y | wordcount }}",
        "{{ ('%s' % [y]) | length }}",
        "{{ (y ~ '') | length }}",
        "{{ '{!r}'.format(y) | length }}",
        "{{ y | tojson | length }}",
        "{{ [1] | tojson(indent='a' * 65) }}",
        "{{ [1] | tojson(indent=65) }}",
    ] {
        let error = refusal(&format!("{value}{use_}"));
        let is_limit =
            error.contains("more than 67108864 bytes") || error.contains("larger than 64 bytes");
        assert!(is_limit, "{use_}: {error}");
    }
}

#[test]
fn names_that_are_searched_one_after_another_are_few() {
    let names = |count: usize| {
        let names: Vec<String> = (0..count).map(|number| format!("a{number}")).collect();
        names
    };
    let named = |count: usize| names(count).join("=1,") + "=1";
    let (few, many) = (names(1000).join(","), names(1001).join(","));
    let (few_named, many_named) = (named(1000), named(1001));
    assert_eq!(
        render(&format!(
            "{{% macro m({few}) %}}x{{% endmacro %}}{{{{ m({few_named}) }}}}"
        ))
        .unwrap(),
        "x"
    );
    for source in [
        format!("{{% macro m({many}) %}}{{% endmacro %}}"),
        format!("{{{{ dict({many_named}) }}}}"),
        "{{ namespace(dict.fromkeys(range(1001))) }}".to_owned(),
        "{{ dict(**dict.fromkeys(range(1001) | map('string'))) }}".to_owned(),
        "{{ [1] | map(attribute='a.' * 1001) | list }}".to_owned(),
        "{{ [1] | sort(attribute='a,' * 1001) }}".to_owned(),
    ] {
        let error = refusal(&source);
        assert!(error.contains("more than 1000 parameters"), "{error}");
    }
}

#[test]
fn many_variables_and_long_keys_are_looked_up_in_a_bounded_time() {
    let start = Instant::now();
    let variables: String = (0..15_000)
        .map(|number| format!("{{%set v{number}=1%}}"))
        .collect();
    let source = format!(
        "{variables}{{% for i in range(99999) %}}{{% for j in range(99999) %}}{{{{ nothing }}}}{{% endfor %}}{{% endfor %}}"
    );
    assert!(refusal(&source).contains("step limit"));
    let source = "{% set k = (('a' * 1000,) * 100000) %}{% set d = {k: 1} %}{% for i in range(99999) %}{% for j in range(99999) %}\
                  {{ d.get(k) }}{{ d[k] }}{{ k in d }}{% endfor %}{% endfor %}";
    assert!(refusal(source).contains("step limit"));
    assert!(
        start.elapsed() < Duration::from_secs(60),
        "{:?}",
        start.elapsed()
    );
}

#[test]
fn strings_are_split_and_wrapped_into_few_parts() {
    let long = "{% set x = 'a ' * 20000000 %}";
    for use_ in [
        "x.split()",
        "x.split('a')",
        "x | wordwrap(3)",
        "x.replace(' ', '\n').splitlines()",
    ] {
        let error = refusal(&format!("{long}{{% set y = {use_} %}}"));
        assert!(error.contains("elements together"), "{use_}: {error}");
    }
}
