//! Numbers and lists formatted for people: counts, bytes, durations, the first of many names.

/// Returns the first three of a list that can be long, and the number of the others.
///
/// ```
/// use overdrive_core::units::first_few;
/// assert_eq!(first_few(&["a", "b", "c"]), "a, b, c");
/// assert_eq!(first_few(&["a", "b", "c", "d", "e"]), "a, b, c and 2 more");
/// ```
pub fn first_few(items: &[impl AsRef<str>]) -> String {
    let shown: Vec<&str> = items.iter().take(3).map(AsRef::as_ref).collect();
    let shown = shown.join(", ");
    match items.len().saturating_sub(3) {
        0 => shown,
        others => format!("{shown} and {others} more"),
    }
}

/// Returns `1234567` as `1,234,567`.
pub fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Returns a number with its noun, whose plural ends in `s`: `1 file`, `2 files`.
pub fn counted(number: usize, noun: &str) -> String {
    match number {
        1 => format!("1 {noun}"),
        _ => format!("{number} {noun}s"),
    }
}

/// Returns a rate or count without decimals: `2,312`; a dash where it is negative or not finite.
pub fn rounded(number: f64) -> String {
    if number.is_finite() && number >= 0.0 {
        thousands(number.round() as u64)
    } else {
        "–".to_owned()
    }
}

/// Returns bytes with a binary unit and three significant digits: `812 MiB`, `1.86 GiB`.
pub fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    // 999.5 rounds to 1000 (here and below: 9.995 to 10.0, 99.95 to 100): the next unit has three digits again.
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let decimals = match value {
        _ if unit == 0 => 0,
        value if value < 9.995 => 2,
        value if value < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.decimals$} {}", UNITS[unit])
}

/// Returns a count with a unit of thousands: `5.80M`, `13.8M`, `950`.
pub fn short_count(number: u64) -> String {
    let value = number as f64;
    let (value, unit) = match number {
        0..1_000 => return number.to_string(),
        1_000..1_000_000 => (value / 1e3, "K"),
        1_000_000..1_000_000_000 => (value / 1e6, "M"),
        _ => (value / 1e9, "B"),
    };
    let decimals = if value < 9.995 {
        2
    } else if value < 99.95 {
        1
    } else {
        0
    };
    format!("{value:.decimals$}{unit}")
}

/// Returns seconds as `48s`, `6m 12s`, `3h 04m`; milliseconds under one second, a dash where they are
/// negative or not finite.
pub fn seconds(seconds: f64) -> String {
    if !seconds.is_finite() || seconds < 0.0 {
        return "–".to_owned();
    }
    if seconds < 1.0 {
        return format!("{:.0}ms", seconds * 1e3);
    }
    let whole = seconds.round() as u64;
    match whole {
        0..60 => format!("{whole}s"),
        60..3600 => format!("{}m {:02}s", whole / 60, whole % 60),
        _ => format!("{}h {:02}m", whole / 3600, whole % 3600 / 60),
    }
}

/// Returns a number of any size in three significant digits, for learning rates and axis labels: `0.002`,
/// `2e-5`, `12`.
pub fn compact(number: f64) -> String {
    if number == 0.0 {
        return "0".to_owned();
    }
    if !number.is_finite() {
        return "–".to_owned();
    }
    let size = number.abs();
    if (1e-4..1e5).contains(&size) {
        // Three significant digits.
        let decimals = (2 - size.log10().floor() as i32).max(0) as usize;
        let text = format!("{number:.decimals$}");
        if text.contains('.') {
            return text.trim_end_matches('0').trim_end_matches('.').to_owned();
        }
        return text;
    }
    let text = format!("{number:.2e}");
    match text.split_once('e') {
        Some((digits, exponent)) if digits.contains('.') => {
            format!(
                "{}e{exponent}",
                digits.trim_end_matches('0').trim_end_matches('.')
            )
        }
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_as_people_write_them() {
        assert_eq!(thousands(0), "0");
        assert_eq!(thousands(999), "999");
        assert_eq!(thousands(1_234_567), "1,234,567");
        assert_eq!(rounded(2311.6), "2,312");
        assert_eq!(rounded(f64::NAN), "–");
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1.00 KiB");
        assert_eq!(bytes(812 << 20), "812 MiB");
        assert_eq!(bytes(2_000_000_000), "1.86 GiB");
        assert_eq!(short_count(950), "950");
        assert_eq!(short_count(5_795_072), "5.80M");
        assert_eq!(short_count(13_767_552), "13.8M");
        assert_eq!(seconds(0.25), "250ms");
        assert_eq!(seconds(48.4), "48s");
        assert_eq!(seconds(372.0), "6m 12s");
        assert_eq!(seconds(11_040.0), "3h 04m");
        assert_eq!(seconds(f64::INFINITY), "–");
        assert_eq!(compact(0.002), "0.002");
        assert_eq!(compact(0.00193), "0.00193");
        assert_eq!(compact(5e-4), "0.0005");
        assert_eq!(compact(5e-5), "5e-5");
        assert_eq!(compact(12.0), "12");
        assert_eq!(compact(100.0), "100");
        assert_eq!(compact(-3.25), "-3.25");
        assert_eq!(compact(1.25e7), "1.25e7");
    }
}
