//! Properties and cases of characters against Python's (`fixtures/gen_unicode.py`).

use overdrive_jinja::Template;
use serde_json::Value;

/// Returns the hash FNV-1a of 64 bits.
fn fnv(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

#[test]
fn characters_have_the_properties_and_cases_of_python() {
    let fixture = include_str!("../fixtures/unicode.json");
    let fixture: Value = serde_json::from_str(fixture).expect("gen_unicode.py makes it");
    let methods = fixture["methods"].as_array().unwrap().iter();
    let methods: String = methods
        .map(|method| format!("{{{{ c.{}() }}}}\t", method.as_str().unwrap()))
        .collect();
    let source = format!("{{% for c in letters %}}{methods}{{{{ '%r' % c }}}}\n{{% endfor %}}");
    let template = Template::parse(&source).unwrap();
    let (mut count, mut wrong) = (0, Vec::new());
    for block in fixture["blocks"].as_array().unwrap() {
        let start = block[0].as_u64().unwrap();
        let runs = block[1].as_array().unwrap().iter();
        let letters: String = runs
            .flat_map(|run| {
                let first = start + run[0].as_u64().unwrap();
                first..first + run[1].as_u64().unwrap()
            })
            .map(|point| char::from_u32(u32::try_from(point).unwrap()).unwrap())
            .collect();
        count += letters.chars().count();
        let variables = [("letters".to_owned(), letters.into())]
            .into_iter()
            .collect();
        let text = template.render(&variables).unwrap();
        if format!("{:016x}", fnv(&text)) != block[2].as_str().unwrap() {
            wrong.push(format!("U+{start:04X}"));
        }
    }
    assert_eq!(count, 144_752);
    assert!(wrong.is_empty(), "blocks that differ: {}", wrong.join(", "));
}
