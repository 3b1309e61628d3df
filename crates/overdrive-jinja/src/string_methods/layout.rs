//! Padding, and tabs.

use super::required_int;
use crate::args::{Args, text};
use crate::error::{Error, Result};
use crate::runtime::Runtime;
use crate::value::{Text, Value};

pub(super) fn justify(
    runtime: &mut Runtime,
    this: &Text,
    name: &'static str,
    args: Args,
) -> Result<Value> {
    let [width, fill] = args.unnamed(name, 1)?;
    let fill = fill.unwrap_or_else(|| Value::from(" "));
    let fill = text(&fill)?;
    if fill.chars().count() != 1 {
        return Err(Error::type_error(
            "The fill character must be exactly one character long",
        ));
    }
    Ok(this.like(justified(runtime, this, name, required_int(width)?, fill)?))
}

/// Pads a string to `width` characters: on both sides (`center`), on the left (`rjust`) or on the right (`ljust`).
pub(crate) fn justified(
    runtime: &mut Runtime,
    this: &Text,
    name: &str,
    width: i128,
    fill: &str,
) -> Result<String> {
    let width = usize::try_from(width.max(0)).unwrap_or(usize::MAX);
    let missing = width.saturating_sub(this.count());
    runtime.reserve_text(
        missing
            .saturating_mul(fill.len())
            .saturating_add(this.text.len()),
    )?;
    let before = match name {
        "center" => missing / 2 + (missing & width & 1),
        "rjust" => missing,
        _ => 0,
    };
    Ok([
        &fill.repeat(before),
        &*this.text,
        &fill.repeat(missing - before),
    ]
    .concat())
}

/// Implements `str.zfill`: writes zeros between the sign and the digits.
pub(super) fn zfill(runtime: &mut Runtime, this: &Text, width: i128) -> Result<Value> {
    let width = usize::try_from(width.max(0)).unwrap_or(usize::MAX);
    let missing = width.saturating_sub(this.count());
    runtime.reserve_text(missing.saturating_add(this.text.len()))?;
    let (sign, digits) = this
        .text
        .split_at(usize::from(this.text.starts_with(['+', '-'])));
    Ok(this.like([sign, &"0".repeat(missing), digits].concat()))
}

pub(super) fn expand_tabs(runtime: &mut Runtime, this: &Text, size: i128) -> Result<Value> {
    let size = usize::try_from(size.max(0)).unwrap_or(usize::MAX);
    let tabs = this.text.matches('\t').count();
    runtime.reserve_text(tabs.saturating_mul(size).saturating_add(this.text.len()))?;
    let (mut out, mut column) = (String::new(), 0);
    for letter in this.text.chars() {
        match letter {
            '\t' if size > 0 => {
                let spaces = size - column % size;
                out.push_str(&" ".repeat(spaces));
                column += spaces;
            }
            '\t' => {}
            letter => {
                out.push(letter);
                column = if ['\n', '\r'].contains(&letter) {
                    0
                } else {
                    column + 1
                };
            }
        }
    }
    Ok(this.like(out))
}
