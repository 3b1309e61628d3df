//! Upper, lower and title case.

use crate::unicode::{is_cased, is_title, push_title};

pub(crate) fn capitalize(word: &str) -> String {
    let mut out = String::with_capacity(word.len());
    let Some(first) = word.chars().next() else {
        return out;
    };
    push_title(first, &mut out);
    // Lower case is computed for the whole string, since the form of a sigma depends on the characters around it.
    let lowered = word.to_lowercase();
    let first: usize = first.to_lowercase().map(char::len_utf8).sum();
    out.push_str(lowered.get(first..).unwrap_or_default());
    out
}

pub(crate) fn title(word: &str) -> String {
    let mut out = String::with_capacity(word.len());
    let mut run = String::new();
    for letter in word.chars() {
        if is_cased(letter) {
            run.push(letter);
        } else {
            out.push_str(&capitalize(&run));
            run.clear();
            out.push(letter);
        }
    }
    out.push_str(&capitalize(&run));
    out
}

pub(super) fn swapcase(word: &str) -> String {
    let mut out = String::with_capacity(word.len());
    // Lower case is computed for the whole string, since the form of a sigma depends on the characters around it.
    let lowered = word.to_lowercase();
    let mut lowered = lowered.chars();
    for letter in word.chars() {
        let lower = lowered.by_ref().take(letter.to_lowercase().count());
        let lower: String = lower.collect();
        if letter.is_uppercase() {
            out.push_str(&lower);
        } else if letter.is_lowercase() {
            out.extend(letter.to_uppercase());
        } else {
            out.push(letter);
        }
    }
    out
}

pub(crate) fn is_lower(word: &str) -> bool {
    word.chars().any(char::is_lowercase) && !word.chars().any(|c| c.is_uppercase() || is_title(c))
}

pub(crate) fn is_upper(word: &str) -> bool {
    word.chars().any(char::is_uppercase) && !word.chars().any(|c| c.is_lowercase() || is_title(c))
}

pub(super) fn is_titled(word: &str) -> bool {
    let (mut any, mut after_cased) = (false, false);
    for letter in word.chars() {
        if letter.is_uppercase() || is_title(letter) {
            if after_cased {
                return false;
            }
            (any, after_cased) = (true, true);
        } else if letter.is_lowercase() {
            if !after_cased {
                return false;
            }
            any = true;
        } else {
            after_cased = false;
        }
    }
    any
}
