/// A filter that ends a stream of text before the first of some strings.
///
/// Text that may still become a stop string is held back until that is certain. The joined results of
/// [`push`](StopFilter::push) and [`finish`](StopFilter::finish) do not depend on how the text is split
/// into pieces, and contain no stop string.
#[derive(Debug, Clone)]
pub struct StopFilter {
    strings: Vec<String>,
    pending: String,
    /// The number of bytes at the start of `pending` in which a complete stop string is ignored.
    exempt: usize,
    stopped: bool,
}

/// The result of a piece of text.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Filtered {
    /// The text that is certain.
    pub text: String,
    /// The index of the stop string that is complete, if any; the text then ends before it.
    pub stop: Option<usize>,
}

impl StopFilter {
    /// Returns a filter for `strings`; empty ones are ignored. Without strings it returns all text at
    /// once.
    pub fn new(strings: &[String]) -> StopFilter {
        StopFilter {
            strings: strings.to_vec(),
            pending: String::new(),
            exempt: 0,
            stopped: false,
        }
    }

    /// Appends a piece of text. After a stop string, all further text is dropped.
    pub fn push(&mut self, piece: &str) -> Filtered {
        self.append(piece, true)
    }

    /// Appends a piece of text as [`push`](StopFilter::push) does. Unless the piece `counts`, stop strings that are
    /// complete with it are part of the text; one that begins in it may still be completed by a later piece.
    pub(crate) fn append(&mut self, piece: &str, counts: bool) -> Filtered {
        if self.stopped {
            return Filtered {
                text: String::new(),
                stop: None,
            };
        }
        self.pending.push_str(piece);
        if !counts {
            self.exempt = self.pending.len();
        }
        if let Some((start, stop)) = self.first_stop() {
            self.stopped = true;
            // Neither the stop string nor the text after it is ever returned.
            self.pending.truncate(start);
            return Filtered {
                text: std::mem::take(&mut self.pending),
                stop: Some(stop),
            };
        }
        let certain = certain_length(&self.pending, &self.strings);
        self.exempt = self.exempt.saturating_sub(certain);
        let rest = self.pending.split_off(certain);
        Filtered {
            text: std::mem::replace(&mut self.pending, rest),
            stop: None,
        }
    }

    /// Returns the text that was held back, at the end of the stream.
    pub fn finish(&mut self) -> String {
        self.exempt = 0;
        std::mem::take(&mut self.pending)
    }

    /// Returns the start and the index of the stop string that ends first, and of the longest one if
    /// several end at the same byte.
    fn first_stop(&self) -> Option<(usize, usize)> {
        self.strings
            .iter()
            .enumerate()
            .filter(|(_, string)| !string.is_empty())
            .filter_map(|(number, string)| {
                // The first start from which a string ends after the exempt text.
                let least = (self.exempt + 1).saturating_sub(string.len());
                let least = self.pending.ceil_char_boundary(least);
                let start = least + self.pending[least..].find(string.as_str())?;
                // The tuple's order is the rule: the smallest end first, then the smallest start, which
                // is the longest string.
                Some((start + string.len(), start, number))
            })
            .min()
            .map(|(_, start, number)| (start, number))
    }
}

/// Returns the number of leading bytes of a text that belong to none of `strings` that its end may begin: all but the longest
/// end that is the beginning of one.
pub fn certain_length(text: &str, strings: &[impl AsRef<str>]) -> usize {
    let strings = || strings.iter().map(AsRef::as_ref);
    let longest = strings().map(str::len).max().unwrap_or(0);
    let first = text.len().saturating_sub(longest);
    (first..text.len())
        .filter(|&start| text.is_char_boundary(start))
        .find(|&start| strings().any(|string| string.starts_with(&text[start..])))
        .unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn filter(strings: &[&str]) -> StopFilter {
        let strings: Vec<String> = strings.iter().map(|&s| s.to_owned()).collect();
        StopFilter::new(&strings)
    }

    #[test]
    fn text_that_may_become_a_stop_string_waits() {
        let mut stop = filter(&["\nUser:", "END"]);
        let mut push = |piece: &str| {
            let Filtered { text, stop } = stop.push(piece);
            (text, stop)
        };
        assert_eq!(push("Hello\n"), ("Hello".to_owned(), None));
        assert_eq!(push("Us"), (String::new(), None));
        assert_eq!(push("ually E"), ("\nUsually ".to_owned(), None));
        assert_eq!(push("N"), (String::new(), None));
        assert_eq!(push("Das"), (String::new(), Some(1)));
        assert_eq!(push("more"), (String::new(), None));
        assert_eq!(stop.finish(), "");
    }

    #[test]
    fn what_was_held_back_comes_at_the_end() {
        let mut stop = filter(&["xyz"]);
        assert_eq!(stop.push("axy").text, "a");
        assert_eq!(stop.finish(), "xy");
        assert_eq!(filter(&[]).push("all").text, "all");
    }

    #[test]
    fn a_stop_string_within_exempt_text_does_not_count_and_one_that_ends_after_it_does() {
        let mut stop = filter(&["éab", "b"]);
        let append = |stop: &mut StopFilter, piece: &str, counts: bool| {
            let Filtered { text, stop } = stop.append(piece, counts);
            (text, stop)
        };
        assert_eq!(append(&mut stop, "béab", false).1, None);
        assert_eq!(append(&mut stop, "b", false).1, None);
        assert_eq!(append(&mut stop, "xé", false).1, None);
        assert_eq!(append(&mut stop, "a", true), (String::new(), None));
        assert_eq!(append(&mut stop, "b", true), (String::new(), Some(0)));
        let mut stop = filter(&["aa"]);
        assert_eq!(append(&mut stop, "aa", false), (String::new(), None));
        // The last two of three letters form a stop string that ends after the exempt text.
        assert_eq!(append(&mut stop, "a", true), ("a".to_owned(), Some(0)));
    }

    #[test]
    fn the_string_that_is_complete_first_counts() {
        let found = filter(&["abcd", "bc"]).push("xabcd");
        assert_eq!((found.text.as_str(), found.stop), ("xa", Some(1)));
        let found = filter(&["bc", "abc"]).push("xabc");
        assert_eq!((found.text.as_str(), found.stop), ("x", Some(1)));
    }

    proptest! {
        #[test]
        fn the_pieces_do_not_matter(
            text in "[abé]{0,20}",
            strings in proptest::collection::vec("[abé]{1,3}", 0..3),
            cuts in proptest::collection::vec(0usize..20, 0..6),
        ) {
            let whole = {
                let mut stop = StopFilter::new(&strings);
                let mut found = String::new();
                let mut which = None;
                // Character by character: no string can be seen later than it is complete.
                for c in text.chars() {
                    let piece = stop.push(&c.to_string());
                    found.push_str(&piece.text);
                    which = which.or(piece.stop);
                }
                found.push_str(&stop.finish());
                (found, which)
            };
            let characters: Vec<char> = text.chars().collect();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c.min(characters.len())).collect();
            cuts.extend([0, characters.len()]);
            cuts.sort_unstable();
            let mut stop = StopFilter::new(&strings);
            let (mut found, mut which) = (String::new(), None);
            for pair in cuts.windows(2) {
                let piece: String = characters[pair[0]..pair[1]].iter().collect();
                let piece = stop.push(&piece);
                found.push_str(&piece.text);
                which = which.or(piece.stop);
            }
            found.push_str(&stop.finish());
            prop_assert!(!strings.iter().any(|s| found.contains(s.as_str())));
            prop_assert_eq!((found, which), whole);
        }
    }
}
