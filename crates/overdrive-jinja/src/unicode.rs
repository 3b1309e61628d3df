//! Properties of characters as Python's `str` sees them.

use std::sync::LazyLock;

use regex::Regex;

/// Returns `true` for white space, as `str.strip` and `str.split` define it.
pub(crate) fn is_space(letter: char) -> bool {
    // Python counts the separators of ASCII as white space; Unicode does not.
    letter.is_whitespace() || ('\x1c'..='\x1f').contains(&letter)
}

/// Returns `true` for what `\w` matches.
pub(crate) fn is_word(letter: char) -> bool {
    letter == '_' || is_alphanumeric(letter)
}

pub(crate) fn is_alphanumeric(letter: char) -> bool {
    is_alphabetic(letter) || is_numeric(letter)
}

/// Returns `true` for letters (`str.isalpha`); Rust's `char::is_alphabetic` is also true for marks and numbers.
pub(crate) fn is_alphabetic(letter: char) -> bool {
    static LETTER: LazyLock<Regex> = LazyLock::new(|| class(r"\p{L}"));
    match letter.is_ascii() {
        true => letter.is_ascii_alphabetic(),
        false => matches(&LETTER, letter),
    }
}

pub(crate) fn is_decimal(letter: char) -> bool {
    static DECIMAL: LazyLock<Regex> = LazyLock::new(|| class(r"\p{Nd}"));
    match letter.is_ascii() {
        true => letter.is_ascii_digit(),
        false => matches(&DECIMAL, letter),
    }
}

/// Returns `true` for decimal digits and for digits in another form, such as superscripts (`str.isdigit`).
pub(crate) fn is_digit(letter: char) -> bool {
    is_decimal(letter)
        || matches!(u32::from(letter),
            0xb2 | 0xb3 | 0xb9 | 0x1369..=0x1371 | 0x19da | 0x2070 | 0x2074..=0x2079 | 0x2080..=0x2089
            | 0x2460..=0x2468 | 0x2474..=0x247c | 0x2488..=0x2490 | 0x24ea | 0x24f5..=0x24fd | 0x24ff
            | 0x2776..=0x277e | 0x2780..=0x2788 | 0x278a..=0x2792 | 0x10a40..=0x10a43
            | 0x10e60..=0x10e68 | 0x11052..=0x1105a | 0x1f100..=0x1f10a)
}

/// The ideographs with a numeric value; their category is that of letters.
const NUMERIC_IDEOGRAPHS: &str = "㐅㒃㠪㭍一七万三九二五亖亿什仟仨伍佰億兆兩八六十千卄卅卌叁参參叄四壱壹幺廾廿弌弍\
    弎弐拾捌柒漆玖百肆萬貮貳贰阡陆陌陸零\u{f96b}\u{f973}\u{f978}\u{f9b2}\u{f9d1}\u{f9d3}\u{f9fd}𠀁𠁤𠃢𠄡𠤪𠦃𠦌𠦜𠫪𠫽𠬙𢎐𢦘𣬛𦉭\
    \u{2f890}";

/// Returns `true` for characters with a numeric value (`str.isnumeric`).
pub(crate) fn is_numeric(letter: char) -> bool {
    letter.is_numeric() || NUMERIC_IDEOGRAPHS.contains(letter)
}

/// Returns `true` for names of Python (`str.isidentifier`).
pub(crate) fn is_identifier(text: &str) -> bool {
    static IDENTIFIER: LazyLock<Regex> =
        LazyLock::new(|| class(r"[_\p{XID_Start}]\p{XID_Continue}*"));
    IDENTIFIER.is_match(text)
}

/// Returns `true` for characters that Python's `repr` shows as they are.
pub(crate) fn is_printable(letter: char) -> bool {
    static PRINTABLE: LazyLock<Regex> = LazyLock::new(|| class(r"[^\p{C}\p{Z}]"));
    match letter.is_ascii() {
        true => (' '..='~').contains(&letter),
        false => matches(&PRINTABLE, letter),
    }
}

/// Returns the decimal value of a digit of any script.
pub(crate) fn decimal_value(letter: char) -> Option<u32> {
    if letter.is_ascii() {
        return letter.to_digit(10);
    }
    if !is_decimal(letter) {
        return None;
    }
    // The ten digits of a script are consecutive, and so are sets of digits that touch.
    let before = (1..u32::from(letter))
        .take_while(|back| char::from_u32(u32::from(letter) - back).is_some_and(is_decimal))
        .count();
    u32::try_from(before % 10).ok()
}

/// Appends the title case of a character. Where upper case has several characters, only the first is upper case.
pub(crate) fn push_title(letter: char, out: &mut String) {
    let after = |by: u32| char::from_u32(u32::from(letter) + by).unwrap_or(letter);
    match letter {
        letter if is_title(letter) => out.push(letter),
        'Ǆ' | 'ǆ' => out.push('ǅ'),
        'Ǉ' | 'ǉ' => out.push('ǈ'),
        'Ǌ' | 'ǌ' => out.push('ǋ'),
        'Ǳ' | 'ǳ' => out.push('ǲ'),
        // Georgian has upper-case letters, which titles do not use.
        'ა'..='ჿ' => out.push(letter),
        // Greek letters with an iota subscript have title-case letters of their own.
        'ᾀ'..='ᾇ' | 'ᾐ'..='ᾗ' | 'ᾠ'..='ᾧ' => out.push(after(8)),
        'ᾳ' | 'ῃ' | 'ῳ' => out.push(after(9)),
        'ŉ' => out.extend(letter.to_uppercase()),
        _ => {
            let mut upper = letter.to_uppercase();
            out.extend(upper.next());
            upper.for_each(|rest| match rest {
                'Ι' => out.push('\u{345}'),
                rest => out.extend(rest.to_lowercase()),
            });
        }
    }
}

/// Returns `true` for letters that have a case.
pub(crate) fn is_cased(letter: char) -> bool {
    letter.is_lowercase() || letter.is_uppercase() || is_title(letter)
}

pub(crate) fn is_title(letter: char) -> bool {
    static TITLE: LazyLock<Regex> = LazyLock::new(|| class(r"\p{Lt}"));
    !letter.is_ascii() && matches(&TITLE, letter)
}

/// Returns Python's `str.casefold`.
pub(crate) fn casefold(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            // Upper case would merge it with `i`.
            'ı' => out.push(letter),
            'ẞ' => out.push_str("ss"),
            // Cherokee had only upper-case letters in early versions of Unicode, so they fold to upper case.
            'Ꭰ'..='ᏽ' | 'ꭰ'..='ꮿ' => out.extend(letter.to_uppercase()),
            _ => letter
                .to_uppercase()
                .for_each(|upper| out.extend(upper.to_lowercase())),
        }
    }
    out
}

fn class(pattern: &str) -> Regex {
    Regex::new(&format!("^{pattern}$")).expect("the pattern is a constant")
}

fn matches(class: &Regex, letter: char) -> bool {
    class.is_match(letter.encode_utf8(&mut [0; 4]))
}
